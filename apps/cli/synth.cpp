// millrace synth: a model of exact shape with random weights, for speed work and tests, written in one pass.
#include "synth.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/thread_pool.h"
#include "io/json_file.h"
#include "io/printable.h"
#include "output.h"
#include "progress.h"
#include "synth/fill.h"
#include "synth/metadata.h"
#include "synth/plan.h"
#include "synth/presets.h"

namespace millrace::cli {
namespace {

struct SynthOptions {
  std::string source, out, type = "q8_0", expert_type;
  int32_t layers = 0;
  int threads = 0;
  uint64_t seed = 1;
};

constexpr const char* kSynthFooter =
    "Examples:\n"
    "  millrace synth gpt-oss-20b 20b.gguf                # 12.1 GB: MXFP4 experts, Q8_0 elsewhere, as "
    "published\n"
    "  millrace synth gpt-oss-20b short.gguf --layers 4   # the same, cut short\n"
    "  millrace synth smollm2-135m q4.gguf --type q4_0\n"
    "  millrace synth path/to/config.json out.gguf        # any Hugging Face config of a supported "
    "architecture\n"
    "The text such a model writes means nothing; its speed and memory are those of the real one. The "
    "vocabulary is\n"
    "made up too. The same seed gives the same file.";

DType matrix_type(const char* option, const std::string& name) {
  const std::optional<DType> type = parse_dtype(name);
  if (!type || !can_fill(*type)) {
    throw_error(ErrorCode::kBadInput,
                "{}: found {}, expected f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, "
                "q6_k or mxfp4",
                option, io::printable(name));
  }
  return *type;
}

// Writes every tensor: pieces of a batch are filled by all threads, then written in order.
class TensorWriter {
 public:
  TensorWriter(io::GgufWriter& writer, const SynthOptions& options, uint64_t total)
      : writer_(writer), pool_(options.threads), seed_(options.seed), total_(total), progress_("writing") {}

  void write(const SynthTensor& tensor, size_t index) {
    int64_t elements = 1;
    for (const int64_t n : tensor.shape) elements *= n;
    if (tensor.sigma == 0.0) return write_fixed(tensor, static_cast<size_t>(elements));
    const size_t bytes = bytes_of(tensor.type, elements);
    const size_t block = static_cast<size_t>(info(tensor.type).block_bytes);
    const size_t piece = kPieceBytes / block * block;  // whole blocks
    buffer_.resize(kPieces * piece);
    for (size_t done = 0; done < bytes;) {
      const size_t batch = std::min(buffer_.size(), bytes - done);
      const auto pieces = static_cast<int64_t>((batch + piece - 1) / piece);
      pool_.parallel_for(pieces, 1, [&](int64_t begin, int64_t end, int) {
        for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
          const uint64_t piece_id = (static_cast<uint64_t>(index) << 32) + done / piece + i;
          fill_random(tensor.type, tensor.sigma, seed_, piece_id, buffer_.data() + i * piece,
                      std::min(piece, batch - i * piece));
        }
      });
      put(buffer_.data(), batch);
      done += batch;
    }
  }

 private:
  static constexpr size_t kPieceBytes = size_t{1} << 18, kPieces = 64;

  void write_fixed(const SynthTensor& tensor, size_t elements) {
    std::vector<float> values = tensor.values;
    values.resize(elements, 1.0f);
    put(values.data(), elements * sizeof(float));
  }

  void put(const void* data, size_t bytes) {
    writer_.write(data, bytes);
    written_ += bytes;
    progress_.update(written_, total_);
  }

  io::GgufWriter& writer_;
  ThreadPool pool_;
  uint64_t seed_, total_, written_ = 0;
  Progress progress_;
  std::vector<std::byte> buffer_;
};

// Another number of layers: what a config lists layer by layer is cut, or goes on from its beginning.
void set_layers(nlohmann::json& config, int32_t layers) {
  const auto count = static_cast<size_t>(layers);
  for (const char* field : {"layer_types", "layers_block_type", "hybrid_override_pattern"}) {
    const auto found = config.find(field);
    if (found == config.end() || found->empty()) continue;
    if (found->is_string()) {
      const auto kinds = found->get<std::string>();
      std::string cut;
      for (size_t l = 0; l < count && !kinds.empty(); ++l) cut.push_back(kinds[l % kinds.size()]);
      *found = cut;
    } else if (found->is_array()) {
      const nlohmann::json kinds = std::exchange(*found, nlohmann::json::array());
      for (size_t l = 0; l < count; ++l) found->push_back(kinds[l % kinds.size()]);
    }
  }
  // Layers by number, from 1 on.
  if (const auto linear = config.find("linear_attn_config"); linear != config.end() && linear->is_object()) {
    for (const char* field : {"full_attn_layers", "kda_layers"}) {
      const auto found = linear->find(field);
      if (found == linear->end() || !found->is_array()) continue;
      const nlohmann::json numbers = std::exchange(*found, nlohmann::json::array());
      for (const nlohmann::json& number : numbers)
        if (number.is_number_integer() && number.get<int64_t>() <= layers) found->push_back(number);
    }
  }
  config["num_hidden_layers"] = layers;
}

int synth(const SynthOptions& options) {
  std::optional<nlohmann::json> config = find_preset(options.source);
  if (!config) {
    if (!std::filesystem::exists(options.source)) {
      throw_error(ErrorCode::kBadInput,
                  "{}: found no such file and no such preset, expected a config.json or one of {}",
                  options.source, preset_names());
    }
    config = io::read_json_object(options.source);
  }
  if (options.layers > 0) set_layers(*config, options.layers);
  SynthTypes types = {.matrix = matrix_type("--type", options.type), .experts = std::nullopt};
  if (!options.expert_type.empty()) types.experts = matrix_type("--expert-type", options.expert_type);
  const SynthPlan plan = make_plan(*config, options.source, types);
  if (types.experts && plan.config.experts == 0) {
    throw_error(ErrorCode::kBadInput, "--expert-type does nothing for {}: found no experts in it",
                options.source);
  }
  io::GgufWriter writer(options.out);
  write_metadata(plan, writer);
  for (const SynthTensor& tensor : plan.tensors) writer.add_tensor(tensor.name, tensor.type, tensor.shape);
  const uint64_t bytes = writer.file_bytes();
  check_disk_space(options.out, bytes);
  TensorWriter tensors(writer, options, bytes);
  for (size_t i = 0; i < plan.tensors.size(); ++i) tensors.write(plan.tensors[i], i);
  writer.commit();
  write_stdout(fmt::format("{}: {}, {} tensors, {}\n", options.out, plan.config.architecture,
                           plan.tensors.size(), human_bytes(bytes)));
  return 0;
}

}  // namespace

void add_synth(CommandLine& line) {
  Command command = line.add("synth", "write a random-weight model of exact shape");
  auto options = std::make_shared<SynthOptions>();
  command.option("SHAPE", options->source, "a config.json, or: " + preset_names()).required();
  command.option("OUT", options->out, "the GGUF file to write; appears whole or not at all").required();
  command
      .option("--type", options->type,
              "of matrices: f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 q4_k q5_k q6_k mxfp4")
      .show_default();
  command.option("--expert-type", options->expert_type,
                 "of experts; default: as published (gpt-oss: mxfp4), else --type");
  command.option("--layers", options->layers, "another number of layers").range(1, 1024);
  command.option("--seed", options->seed, "of the weights").show_default();
  command.option("--threads", options->threads, "0: all that this process may use")
      .range(0, 1024)
      .show_default();
  command.footer(kSynthFooter);
  command.runs([options] { return synth(*options); });
}

}  // namespace millrace::cli
