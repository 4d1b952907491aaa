// millrace quantize: any checkpoint into a GGUF file of another type, in one pass: rows are encoded on all
// threads while the ones after them are read and the ones before them are written.
#include "quantize.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>

#include "base/error.h"
#include "base/read_before.h"
#include "base/thread_pool.h"
#include "confirm.h"
#include "engine/auto_types.h"
#include "engine/input_sums.h"
#include "input.h"
#include "io/hf_directory.h"
#include "io/imatrix.h"
#include "io/printable.h"
#include "model_names.h"
#include "model_options.h"
#include "output.h"
#include "progress.h"
#include "prompt.h"
#include "quant/feedback.h"
#include "quantize/fp8_directory.h"
#include "quantize/metadata.h"
#include "quantize/verify.h"
#include "quantize/write_behind.h"

namespace millrace::cli {
namespace {

struct QuantizeOptions {
  EngineOptions engine = default_options();  // the model, threads and, for auto, the device
  std::string out, type = "int8", output_type, budget, sample, imatrix;
  bool portable = false, verify = false, json = false;
};

constexpr const char* kQuantizeFooter =
    "Examples:\n"
    "  millrace quantize model.gguf small.gguf --type q4_k\n"
    "  millrace quantize path/to/hf-directory model.gguf --type int8\n"
    "  millrace quantize path/to/hf-directory model.gguf --type q4_k --verify\n"
    "  millrace quantize model.gguf small.gguf --type iq4_xs --imatrix imatrix.gguf\n"
    "  millrace quantize model.gguf best.gguf --type auto --budget 4.5bpw\n"
    "  millrace quantize model.gguf best.gguf --type auto --budget 800M --sample text.txt --json\n"
    "int8 is q8_0. int4 is q4_k (4.5 bits per weight), the 4-bit type of least error for its size, and q4_1 "
    "(5 "
    "bits)\n"
    "where rows do not come in 256s; both leave alone what is stored in no more bits already. Norms, biases, "
    "sinks\n"
    "and routers stay f32. The output matrix (or the embedding that serves as one) gets q6_k for types below "
    "6 "
    "bits;\n"
    "--output-type says otherwise. auto gives each tensor the type that disturbs the logits least on a "
    "sample "
    "text\n"
    "under --budget: bytes of the file (800M, 3.5GiB) or bits per weight (4.5bpw).\n"
    "fp8 writes a Hugging Face directory from one, as compressed-tensors does: E4M3 with a scale for each "
    "row.\n"
    "q4_z is Millrace's own: q4_1 in 4.5 bits. Other programs cannot read it; --portable keeps auto from it.";

constexpr size_t kPieceBytes = size_t{4} << 20;

struct Report {
  std::vector<quant::RecodeError> errors;  // of each tensor
  std::optional<AutoTypes> chosen;
  std::vector<std::vector<float>> importance;  // of each tensor's columns; empty: all alike
  std::optional<Verification> verified;
  size_t read_bytes = 0, file_bytes = 0;
  double seconds = 0.0, waited_to_read = 0.0, waited_to_write = 0.0;

  double encoding_seconds() const { return std::max(0.0, seconds - waited_to_read - waited_to_write); }
  // What took longest, with the two others under way beside it.
  const char* limit() const {
    if (encoding_seconds() >= std::max(waited_to_read, waited_to_write)) return "encoding";
    return waited_to_read > waited_to_write ? "reading" : "writing";
  }
};

// Encodes and writes one tensor after the other.
class TensorRecoder {
 public:
  TensorRecoder(io::GgufWriter& writer, const std::vector<OutTensor>& tensors, int threads, size_t total)
      : before_(ranges_of(tensors)),
        behind_(writer),
        pool_(threads),
        total_(total),
        progress_("quantizing") {}

  // Tensor `index` of the list. `inputs` of the matrix on the sample, or none: what its errors are weighed by
  // and flow along.
  // `importance`: of the columns alone, [experts, cols] of weights [experts, rows, cols]; or empty.
  quant::RecodeError recode(size_t index, const OutTensor& tensor, const TensorView& source,
                            const quant::MatrixInputs* inputs, std::span<const float> importance_of_each) {
    if (!tensor.values.empty()) {
      const size_t bytes = tensor.values.size() * sizeof(float);
      std::memcpy(behind_.buffer(bytes), tensor.values.data(), bytes);
      behind_.submit(bytes);
      return {};
    }
    const int64_t rows = source.rows(), cols = source.cols(), chunk = quant::recode_chunk(cols);
    const size_t row_bytes = bytes_of(tensor.type, cols);
    const int64_t batch = std::max<int64_t>(1, static_cast<int64_t>(kPieceBytes / row_bytes));
    const float* importance = inputs == nullptr ? nullptr : inputs->squares.data();
    const int64_t experts =
        importance_of_each.empty() ? 1 : static_cast<int64_t>(importance_of_each.size()) / cols;
    const int64_t expert_rows = std::max<int64_t>(1, rows / experts);
    const quant::ErrorFeedback* feedback =
        inputs == nullptr || tensor.type == source.type
            ? nullptr
            : feedback_.of(tensor.type, cols, *inputs, [&](int64_t count, const auto& body) {
                pool_.parallel_for(count, std::max<int64_t>(1, count / (8 * pool_.size())),
                                   [&](int64_t begin, int64_t end, int) { body(begin, end); });
              });
    quant::RecodeError sum;
    std::mutex mutex;
    for (int64_t first = 0; first < rows; first += batch) {
      const int64_t count = std::min(batch, rows - first);
      // In another order than the file's the rows come from all over it.
      const int64_t last = tensor.order.head_dim == 0 ? first + count : rows;
      before_.wait_for(index, static_cast<size_t>(last * source.row_stride_bytes));
      std::byte* const out = behind_.buffer(static_cast<size_t>(count) * row_bytes);
      pool_.parallel_for((count + chunk - 1) / chunk, 1, [&](int64_t begin, int64_t end, int) {
        const int64_t from = begin * chunk, to = std::min(end * chunk, count);
        quant::RecodeError error;
        for (int64_t row = from; row < to;) {  // an expert's rows at a time: each has columns of its own
          const int64_t expert = (first + row) / expert_rows;
          const int64_t end_row = std::min(to, (expert + 1) * expert_rows - first);
          const float* weights =
              importance_of_each.empty() ? importance : importance_of_each.data() + expert * cols;
          error += quant::recode_rows(source, first + row, end_row - row, tensor.type, weights, tensor.order,
                                      out + static_cast<size_t>(row) * row_bytes, feedback);
          row = end_row;
        }
        const std::lock_guard lock(mutex);
        sum += error;
      });
      behind_.submit(static_cast<size_t>(count) * row_bytes);
      done_ += static_cast<size_t>(count) * bytes_of(source.type, cols);
      progress_.update(std::min(done_, total_), total_);
    }
    return sum;
  }
  void finish() { behind_.finish(); }
  double waited_to_read() const { return before_.waited(); }
  double waited_to_write() const { return behind_.waited(); }

 private:
  // Where each tensor lies in the file; nothing for those that are gathered, in memory, as they come.
  static std::vector<ReadBefore::Range> ranges_of(const std::vector<OutTensor>& tensors) {
    std::vector<ReadBefore::Range> ranges;
    for (const OutTensor& tensor : tensors) {
      const TensorView& view = tensor.source;
      const bool mapped = view.data != nullptr && tensor.values.empty() && view.rows() > 0;
      const size_t bytes = mapped ? static_cast<size_t>((view.rows() - 1) * view.row_stride_bytes) +
                                        bytes_of(view.type, view.cols())
                                  : 0;
      ranges.push_back({view.data, bytes});
    }
    return ranges;
  }

  ReadBefore before_;
  WriteBehind behind_;
  ThreadPool pool_;
  size_t total_, done_ = 0;
  Progress progress_;
  quant::FeedbackCache feedback_;
};

int64_t elements_of(const std::vector<OutTensor>& tensors) {
  int64_t sum = 0;
  for (const OutTensor& tensor : tensors) sum += tensor.source.elements();
  return sum;
}

size_t data_bytes(const std::vector<OutTensor>& tensors) {
  size_t sum = 0;
  for (const OutTensor& tensor : tensors) sum += tensor.bytes();
  return sum;
}

// The type most of the weights have.
DType main_type(const std::vector<OutTensor>& tensors) {
  std::map<DType, int64_t> counts;
  for (const OutTensor& tensor : tensors) {
    if (tensor.part == quant::Part::kMatrix) counts[tensor.type] += tensor.source.elements();
  }
  const auto most = std::max_element(counts.begin(), counts.end(),
                                     [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == counts.end() ? DType::kF32 : most->first;
}

void set_types(const QuantizeOptions& options, const io::Checkpoint& checkpoint,
               std::vector<OutTensor>& tensors) {
  quant::TypeRequest request = quant::parse_request("--type", options.type);
  if (!options.output_type.empty()) {
    request.output_type = quant::parse_request("--output-type", options.output_type, false).type;
  }
  const bool tied = has_tied_output(checkpoint);
  for (OutTensor& tensor : tensors) {
    tensor.type =
        tensor.values.empty() ? quant::target_type(request, tensor.name, tensor.source, tied) : DType::kF32;
  }
}

nlohmann::ordered_json to_json(const Verification& v) {
  return {{"good", v.good()}, {"tokens", v.tokens}, {"relative_error", v.relative_error},
          {"limit", v.limit}, {"kl", v.kl},         {"top1_agreement", v.top1_agreement}};
}

std::string to_text(const Verification& v) {
  return fmt::format(
      "verified on {} tokens: logits differ by {:.2f}% of their spread (the types explain up to {:.0f}%), "
      "{:.5f} nats a token, the same likeliest token at {:.0f}%\n",
      v.tokens, 100 * v.relative_error, 100 * v.limit, v.kl, 100 * v.top1_agreement);
}

nlohmann::ordered_json to_json(const QuantizeOptions& options, const std::vector<OutTensor>& tensors,
                               const Report& report) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (size_t i = 0; i < tensors.size(); ++i) {
    rows.push_back({{"name", valid_utf8(tensors[i].name)},
                    {"from", info(tensors[i].source.type).name},
                    {"to", info(tensors[i].type).name},
                    {"bytes", tensors[i].bytes()},
                    {"relative_rms", report.errors[i].relative_rms()}});
  }
  nlohmann::ordered_json out = {
      {"out", valid_utf8(options.out)},
      {"type", options.type},
      {"file_bytes", report.file_bytes},
      {"bits_per_weight",
       8.0 * static_cast<double>(data_bytes(tensors)) / static_cast<double>(elements_of(tensors))},
      {"seconds", report.seconds},
      {"read_gb_s", static_cast<double>(report.read_bytes) * 1e-9 / report.seconds},
      {"write_gb_s", static_cast<double>(report.file_bytes) * 1e-9 / report.seconds},
      {"waited_to_read_seconds", report.waited_to_read},
      {"waited_to_write_seconds", report.waited_to_write},
      {"limit", report.limit()}};
  if (report.chosen) {
    out["sample_tokens"] = report.chosen->sample_tokens;
    out["expected_kl"] = report.chosen->expected_kl;
    out["kl_of_groups_in_q4_0"] = report.chosen->group_kl;
  }
  if (report.verified) {
    out["verified"] = to_json(*report.verified);
  }
  out["tensors"] = std::move(rows);
  return out;
}

std::string to_text(const QuantizeOptions& options, const std::vector<OutTensor>& tensors,
                    const Report& report) {
  std::string out =
      fmt::format("{:<40} {:>8} {:>8} {:>11} {:>13}\n", "tensor", "from", "to", "size", "relative rms");
  size_t small = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const OutTensor& tensor = tensors[i];
    if (tensor.part == quant::Part::kSmall) {
      ++small;
      continue;
    }
    out += fmt::format(
        "{:<40} {:>8} {:>8} {:>11} {:>13}\n", tensor.name, info(tensor.source.type).name,
        info(tensor.type).name, human_bytes(tensor.bytes()),
        report.errors[i].error == 0.0 ? "exact" : fmt::format("{:.5f}", report.errors[i].relative_rms()));
  }
  out += fmt::format("{} norms, biases, sinks and routers are f32\n", small);
  if (report.chosen) {
    out += fmt::format("expected divergence {:.5f} nats a token on {} tokens of sample text\n",
                       report.chosen->expected_kl, report.chosen->sample_tokens);
  }
  out +=
      fmt::format("{}: {}, {:.3f} bits per weight, {:.1f} s, {}/s read, {}/s written, {} is the limit\n",
                  options.out, human_bytes(report.file_bytes),
                  8.0 * static_cast<double>(data_bytes(tensors)) / static_cast<double>(elements_of(tensors)),
                  report.seconds,
                  human_bytes(static_cast<size_t>(static_cast<double>(report.read_bytes) / report.seconds)),
                  human_bytes(static_cast<size_t>(static_cast<double>(report.file_bytes) / report.seconds)),
                  report.limit());
  if (report.verified) out += to_text(*report.verified);
  return out;
}

void write_file(const QuantizeOptions& options, const io::Checkpoint& checkpoint,
                const std::optional<ModelConfig>& config, const std::vector<OutTensor>& tensors,
                Report& report) {
  const auto start = std::chrono::steady_clock::now();
  io::GgufWriter writer(options.out);
  write_quantized_metadata(checkpoint, config, main_type(tensors), writer);
  for (const OutTensor& tensor : tensors) writer.add_tensor(tensor.name, tensor.type, tensor.shape());
  report.file_bytes = writer.file_bytes();
  check_disk_space(options.out, report.file_bytes);
  for (const OutTensor& tensor : tensors) report.read_bytes += tensor.source.bytes();
  report.errors.resize(tensors.size());
  report.importance.resize(tensors.size());
  {
    TensorRecoder recoder(writer, tensors, options.engine.threads, report.read_bytes);
    visit_tensors(checkpoint, config, tensors, [&](size_t i, const TensorView& source) {
      const quant::MatrixInputs* inputs = nullptr;
      if (report.chosen) {
        const auto found = report.chosen->calibration.find(tensors[i].name);
        if (found != report.chosen->calibration.end()) inputs = &found->second;
      }
      report.errors[i] = recoder.recode(i, tensors[i], source, inputs, report.importance[i]);
    });
    recoder.finish();
    report.waited_to_read = recoder.waited_to_read();
    report.waited_to_write = recoder.waited_to_write();
  }
  const auto encoded = std::chrono::steady_clock::now();
  writer.commit();
  const auto end = std::chrono::steady_clock::now();
  report.waited_to_write += std::chrono::duration<double>(end - encoded).count();
  report.seconds = std::chrono::duration<double>(end - start).count();
}

// Bytes of the file before its data.
size_t header_bytes(const io::Checkpoint& checkpoint, const std::optional<ModelConfig>& config,
                    const std::vector<OutTensor>& tensors) {
  io::GgufWriter trial("/dev/null");
  write_quantized_metadata(checkpoint, config, DType::kQ8_0, trial);
  for (const OutTensor& tensor : tensors) trial.add_tensor(tensor.name, DType::kF32, tensor.shape());
  return trial.header().size();
}

// A file that computes something else than its source is put aside, under a name that nobody loads by
// mistake.
void verify(const QuantizeOptions& options, Report& report) {
  quant::RecodeError sum;
  for (const quant::RecodeError& error : report.errors) sum += error;
  const double weight_error = sum.total > 0 ? sum.relative_rms() : 0.0;
  report.verified = verify_logits(options.engine, options.out, weight_error);
  if (report.verified->good()) return;
  const std::string aside = options.out + ".rejected";
  std::filesystem::rename(options.out, aside);
  throw_error(
      ErrorCode::kInternal,
      "{}: logits differ from those of {} by {:.1f}% of their spread, expected at most {:.1f}%: the file is "
      "wrong and is now {}",
      options.out, options.engine.model, 100 * report.verified->relative_error, 100 * report.verified->limit,
      aside);
}

// What the importance matrix says of each tensor that is written anew.
void read_importance(const std::string& path, const std::vector<OutTensor>& tensors, Report& report) {
  const io::ImportanceMatrix matrix = io::read_imatrix(path);
  report.importance.resize(tensors.size());
  size_t found = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorView& view = tensors[i].source;
    if (tensors[i].part == quant::Part::kSmall || !tensors[i].values.empty()) continue;
    const int64_t experts = view.rank == 3 ? view.shape[0] : 1;
    report.importance[i] = importance_of(matrix, path, tensors[i].name, experts, view.cols());
    found += report.importance[i].empty() ? 0 : 1;
  }
  if (found == 0) {
    throw_error(ErrorCode::kBadInput,
                "--imatrix: {}: found no entry for any of this model's tensors, such as {}", path,
                matrix.entries.begin()->first);
  }
}

// A Hugging Face directory instead of a GGUF file, which has no such type.
int quantize_fp8(const QuantizeOptions& options) {
  QuantizeOptions found = options;
  found.engine.model = find_model(options.engine.model, options.engine);
  const io::Checkpoint checkpoint = io::Checkpoint::open(found.engine.model);
  const auto start = std::chrono::steady_clock::now();
  ThreadPool pool(options.engine.threads);
  const Fp8Report written = write_fp8_directory(checkpoint, read_config(checkpoint), options.out, pool);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  Report report;
  report.errors = {written.error};
  if (options.verify) verify(found, report);
  if (options.json) {
    nlohmann::ordered_json out = {{"out", valid_utf8(options.out)},
                                  {"type", options.type},
                                  {"file_bytes", written.file_bytes},
                                  {"seconds", seconds.count()},
                                  {"quantized_tensors", written.quantized},
                                  {"kept_tensors", written.kept},
                                  {"relative_rms", written.error.relative_rms()}};
    if (report.verified) out["verified"] = to_json(*report.verified);
    write_json(out);
  } else {
    write_stdout(
        fmt::format("{}: {}, {} matrices in fp8 (relative rms {:.5f}), {} tensors as they were, {:.1f} s\n",
                    options.out, human_bytes(written.file_bytes), written.quantized,
                    written.error.relative_rms(), written.kept, seconds.count()));
    if (report.verified) write_stdout(to_text(*report.verified));
  }
  return 0;
}

int quantize(const QuantizeOptions& options) {
  if (options.type == "fp8") return quantize_fp8(options);
  if (options.type != "auto") quant::parse_request("--type", options.type);  // before anything is opened
  if (options.type == "auto" && options.budget.empty()) {
    throw_error(ErrorCode::kBadInput,
                "--budget: found none, expected one for --type auto, such as 4.5bpw or 800M");
  }
  const std::string model = find_model(options.engine.model, options.engine);
  const io::Checkpoint checkpoint = io::Checkpoint::open(model);
  std::optional<ModelConfig> config;
  if (checkpoint.hf) config = read_config(checkpoint);
  std::vector<OutTensor> tensors = list_tensors(checkpoint, config);
  Report report;
  if (options.type == "auto") {
    const size_t budget = budget_bytes("--budget", options.budget, elements_of(tensors),
                                       header_bytes(checkpoint, config, tensors));
    EngineOptions engine = options.engine;
    engine.model = model;
    if (!options.sample.empty()) engine.quantize_sample = read_input(options.sample);
    Progress progress("measuring");
    engine.on_load = [&](size_t done, size_t total) { progress.update(done, total); };
    report.chosen = choose_types(engine, budget, tensors, options.portable);
  } else {
    set_types(options, checkpoint, tensors);
  }
  if (!options.imatrix.empty()) read_importance(options.imatrix, tensors, report);
  write_file(options, checkpoint, config, tensors, report);
  if (options.verify) verify(options, report);
  if (options.json) {
    write_json(to_json(options, tensors, report));
  } else {
    write_stdout(to_text(options, tensors, report));
  }
  return 0;
}

}  // namespace

void add_quantize(CommandLine& line) {
  Command command = line.add("quantize", "a GGUF file of another type from any checkpoint");
  auto options = std::make_shared<QuantizeOptions>();
  command.option("IN", options->engine.model, kModelHelp).required();
  add_yes_option(command, "fetch the model without asking if it is not here");
  command
      .option("OUT", options->out,
              "the GGUF file to write, or of fp8 the directory; appears whole or not at all")
      .required();
  command.option("--type", options->type, "of matrices: " + quant::request_names() + " auto fp8")
      .show_default();
  command.option("--output-type", options->output_type, "of the output matrix, or of a tied embedding");
  command.option("--budget", options->budget, "for auto: 800M (the file) or 4.5bpw (bits per weight)");
  command.option("--sample", options->sample, "for auto: a text to measure by; -: standard input");
  command.option("--imatrix", options->imatrix,
                 "an importance matrix (millrace calibrate, llama.cpp): errors count by what columns are "
                 "multiplied with");
  command.option("--device", options->engine.device, "for auto and --verify: where to measure")
      .show_default();
  command.option("--threads", options->engine.threads, "0: all that this process may use")
      .range(0, 1024)
      .show_default();
  command.flag("--portable", options->portable, "for auto: only types that other programs read too");
  command.flag("--verify", options->verify, "compare the logits of the file with those of IN, on --device");
  command.flag("--json", options->json, "one JSON object");
  command.footer(kQuantizeFooter);
  const auto automatic = [options] { return options->type == "auto"; };
  for (const char* name : {"--imatrix", "--output-type"}) {
    command.refuse_unless(
        name, [options] { return options->type != "fp8"; }, "with --type fp8, which has one scale for a row");
  }
  for (const char* name : {"--budget", "--sample", "--portable"}) {
    command.refuse_unless(name, automatic, "without --type auto");
  }
  command.refuse_unless(
      "--device", [options, automatic] { return automatic() || options->verify; },
      "without --type auto or --verify");
  command.refuse_unless(
      "--imatrix", [automatic] { return !automatic(); }, "with --type auto, which measures by itself");
  command.refuse_unless(
      "--output-type", [automatic] { return !automatic(); },
      "with --type auto, which chooses for every tensor");
  command.runs([options] { return quantize(*options); });
}

}  // namespace millrace::cli
