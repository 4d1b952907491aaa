#include "quantize/fp8_directory.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/error.h"
#include "base/float_bits.h"
#include "io/hf_directory.h"
#include "io/json_file.h"
#include "io/safetensors_writer.h"
#include "kernels/quant/codec.h"
#include "kernels/quant/kv_types.h"
#include "model/architecture.h"
#include "output.h"
#include "progress.h"

namespace millrace::cli {
namespace {

namespace fs = std::filesystem;

constexpr float kLargest = 448.0f;      // of E4M3
constexpr size_t kMaxListed = 100'000;  // modules in the list of those left alone

// A folder that takes its name when all of it is there; else it is removed.
class NewDirectory {
 public:
  explicit NewDirectory(const std::string& path) : path_(path), partial_(path + ".partial") {
    if (fs::exists(path_)) {
      throw_error(ErrorCode::kBadInput, "{}: found it there already, expected a name for a new directory",
                  path);
    }
    fs::remove_all(partial_);
    std::error_code error;
    fs::create_directory(partial_, error);
    if (error) throw_error(ErrorCode::kIo, "{}: cannot be made: {}", partial_.string(), error.message());
  }
  ~NewDirectory() {
    std::error_code ignored;
    if (!done_) fs::remove_all(partial_, ignored);
  }
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;

  const fs::path& path() const { return partial_; }
  void commit() {
    fs::rename(partial_, path_);
    done_ = true;
  }

 private:
  fs::path path_, partial_;
  bool done_ = false;
};

// safetensors' name of a type that is copied as it is.
std::string dtype_name(const io::Checkpoint& source, const TensorView& tensor) {
  switch (tensor.type) {
    case DType::kF32:
      return "F32";
    case DType::kF16:
      return "F16";
    case DType::kBF16:
      return "BF16";
    case DType::kI32:
      return "I32";
    default:
      throw_error(ErrorCode::kUnsupported, "{}: tensor {}: found {}, expected a model of plain floats",
                  source.path(), tensor.name, info(tensor.type).name);
  }
}

std::vector<int64_t> shape_of(const TensorView& tensor) {
  return {tensor.shape.begin(), tensor.shape.begin() + tensor.rank};
}

class Fp8Writer {
 public:
  Fp8Writer(const io::Checkpoint& source, const ModelConfig& config, ThreadPool& pool)
      : source_(source), config_(config), pool_(pool) {
    if (!source.hf) {
      throw_error(ErrorCode::kUnsupported,
                  "--type fp8: found {}, expected a Hugging Face directory: a GGUF file has no such type",
                  source.path());
    }
    if (source.hf->config.contains("quantization_config")) {
      throw_error(
          ErrorCode::kUnsupported,
          "--type fp8: {}: config.json: quantization_config: found one, expected a model of plain floats",
          source.path());
    }
    find_projections();
  }

  Fp8Report write(const std::string& out) {
    NewDirectory folder(out);
    copy_files(folder.path());
    write_weights((folder.path() / "model.safetensors").string());
    write_config((folder.path() / "config.json").string());
    folder.commit();
    return report_;
  }

 private:
  // The weights of torch's Linear modules within the layers, by their names in the source.
  void find_projections() {
    const Architecture& architecture = architecture_of(config_);
    const HfNames hf = architecture.hf_names();
    std::set<std::string> wanted;
    for (int l = 0; l < config_.layers; ++l) {
      const std::string before = fmt::format("{}{}.", hf.layers, l);
      for (const WeightSpec& spec : architecture.layer_weights(config_, l)) {
        if (spec.experts && spec.shape.size() == 3) {
          for (int32_t e = 0; !spec.experts->single.empty() && e < config_.experts; ++e) {
            wanted.insert(
                fmt::format("{}{}{}.{}.weight", before, spec.experts->before, e, spec.experts->single));
          }
        }
        if (spec.use != WeightUse::kDequantized || spec.shape.size() != 2) continue;
        if (spec.hf_transposed) {
          throw_error(
              ErrorCode::kUnsupported,
              "--type fp8: {}: architecture {} has transposed matrices, expected torch's Linear modules",
              source_.path(), config_.architecture);
        }
        if (!spec.hf.empty()) wanted.insert(before + std::string(spec.hf));
        if (spec.part_of && !spec.part_of->hf.empty()) wanted.insert(before + std::string(spec.part_of->hf));
      }
    }
    for (const TensorView& tensor : source_.tensors()) {
      // Models that also see have a word before or within the names.
      std::string name(tensor.name);
      if (const size_t at = name.find("language_model."); at != std::string::npos) name.erase(at, 15);
      if (!hf.prefix.empty() && name.starts_with(hf.prefix)) name.erase(0, hf.prefix.size());
      const bool stacked = tensor.rank == 3 && name.find(".experts.") != std::string::npos;
      if (stacked) {
        throw_error(ErrorCode::kUnsupported,
                    "--type fp8: {}: tensor {}: found all experts in one tensor, expected a matrix each",
                    source_.path(), tensor.name);
      }
      if (tensor.rank == 2 && wanted.contains(name)) projections_.insert(std::string(tensor.name));
    }
    if (projections_.empty()) {
      throw_error(ErrorCode::kUnsupported, "--type fp8: {}: found no projection to quantize", source_.path());
    }
  }

  // Tokenizer, template, generation_config: everything that is no weight.
  void copy_files(const fs::path& to) const {
    for (const fs::directory_entry& entry : fs::directory_iterator(source_.path())) {
      const fs::path& path = entry.path();
      const std::string name = path.filename().string(), kind = path.extension().string();
      const bool weights = kind == ".safetensors" || kind == ".bin" || kind == ".gguf" || kind == ".pt" ||
                           kind == ".pth" || kind == ".msgpack" || kind == ".h5" ||
                           name.ends_with(".index.json");
      if (!entry.is_regular_file() || weights || name == "config.json") continue;
      fs::copy_file(path, to / name);
    }
  }

  void write_weights(const std::string& path) {
    io::SafetensorsWriter writer(path);
    size_t total = 0, done = 0;
    for (const TensorView& tensor : source_.tensors()) {
      const std::string type = dtype_name(source_, tensor);
      total += tensor.bytes();
      if (!projections_.contains(std::string(tensor.name))) {
        writer.add_tensor(tensor.name, type, shape_of(tensor), tensor.bytes());
        report_.file_bytes += tensor.bytes();
        ++report_.kept;
        continue;
      }
      const auto rows = tensor.shape[0];
      writer.add_tensor(tensor.name, "F8_E4M3", shape_of(tensor), static_cast<size_t>(tensor.elements()));
      writer.add_tensor(std::string(tensor.name) + "_scale", "F32", {rows, 1},
                        static_cast<size_t>(rows) * sizeof(float));
      report_.file_bytes += static_cast<size_t>(tensor.elements() + 4 * rows);
      ++report_.quantized;
    }
    check_disk_space(path, report_.file_bytes);
    Progress progress("quantizing");
    for (const TensorView& tensor : source_.tensors()) {
      if (projections_.contains(std::string(tensor.name))) {
        write_projection(tensor, writer);
      } else {
        writer.write(tensor.data, tensor.bytes());
      }
      done += tensor.bytes();
      progress.update(done, total);
    }
    writer.commit();
  }

  // Codes [rows, cols] and a scale for each row: its largest value becomes E4M3's.
  void write_projection(const TensorView& tensor, io::SafetensorsWriter& writer) {
    const int64_t rows = tensor.shape[0], cols = tensor.shape[1];
    std::vector<uint8_t> codes(static_cast<size_t>(rows * cols));
    std::vector<float> scales(static_cast<size_t>(rows));
    std::vector<quant::RecodeError> errors(static_cast<size_t>(rows));
    std::vector<char> finite(static_cast<size_t>(rows), 1);
    pool_.parallel_for(rows, 16, [&](int64_t begin, int64_t end, int) {
      std::vector<float> x(static_cast<size_t>(cols));
      for (int64_t r = begin; r < end; ++r) {
        quant::dequantize_row(tensor, r, x.data());
        float largest = 0.0f;
        for (const float v : x) {
          largest = std::max(largest, std::abs(v));
          if (!std::isfinite(v)) finite[static_cast<size_t>(r)] = 0;
        }
        // A row of zeros, or of numbers whose scale float32 does not hold, keeps a scale of one.
        float scale = largest / kLargest;
        if (!(scale >= 0x1p-126f)) scale = 1.0f;
        scales[static_cast<size_t>(r)] = scale;
        quant::RecodeError& error = errors[static_cast<size_t>(r)];
        for (int64_t c = 0; c < cols; ++c) {
          const float v = x[static_cast<size_t>(c)];
          const uint8_t code = to_e4m3(std::clamp(v / scale, -kLargest, kLargest));
          codes[static_cast<size_t>(r * cols + c)] = code;
          const double off = double{v} - double{to_float(Fp8E4M3{code})} * scale;
          error.error += off * off;
          error.total += double{v} * v;
        }
      }
    });
    for (int64_t r = 0; r < rows; ++r) {
      if (finite[static_cast<size_t>(r)] == 0) {
        throw_error(ErrorCode::kBadInput,
                    "{}: tensor {}: row {}: found NaN or infinity, expected finite values", source_.path(),
                    tensor.name, r);
      }
      report_.error += errors[static_cast<size_t>(r)];
    }
    writer.write(codes.data(), codes.size());
    writer.write(scales.data(), scales.size() * sizeof(float));
  }

  // Linear modules that stay as they are: the output, routers. Embeddings and norms are none.
  std::vector<std::string> ignored_modules() const {
    std::vector<std::string> ignored = {"lm_head"};
    for (const TensorView& tensor : source_.tensors()) {
      std::string name(tensor.name);
      if (tensor.rank != 2 || !name.ends_with(".weight") || projections_.contains(name)) continue;
      name.resize(name.size() - 7);
      const bool known = std::find(ignored.begin(), ignored.end(), name) != ignored.end();
      if (!known && name.find("embed") == std::string::npos && ignored.size() < kMaxListed)
        ignored.push_back(name);
    }
    return ignored;
  }

  void write_config(const std::string& path) const {
    // As the file has it: HfDirectory's is rearranged.
    nlohmann::json config = io::read_json_object((fs::path(source_.path()) / "config.json").string());
    config["quantization_config"] = {{"quant_method", "compressed-tensors"},
                                     {"format", "float-quantized"},
                                     {"quantization_status", "compressed"},
                                     {"kv_cache_scheme", nullptr},
                                     {"global_compression_ratio", nullptr},
                                     {"ignore", ignored_modules()},
                                     {"config_groups",
                                      {{"group_0",
                                        {{"targets", {"Linear"}},
                                         {"input_activations", nullptr},
                                         {"output_activations", nullptr},
                                         {"weights",
                                          {{"num_bits", 8},
                                           {"type", "float"},
                                           {"strategy", "channel"},
                                           {"symmetric", true},
                                           {"dynamic", false},
                                           {"group_size", nullptr},
                                           {"block_structure", nullptr},
                                           {"actorder", nullptr},
                                           {"observer", "minmax"},
                                           {"observer_kwargs", nlohmann::json::object()}}}}}}}};
    const std::string text = config.dump(2) + "\n";
    AtomicFile file(path);
    file.write(text.data(), text.size());
    file.commit();
  }

  const io::Checkpoint& source_;
  const ModelConfig& config_;
  ThreadPool& pool_;
  std::set<std::string> projections_;
  Fp8Report report_;
};

}  // namespace

Fp8Report write_fp8_directory(const io::Checkpoint& source, const ModelConfig& config, const std::string& out,
                              ThreadPool& pool) {
  return Fp8Writer(source, config, pool).write(out);
}

}  // namespace millrace::cli
