// Which scheme a weight is stored in, by the tensors that are there and by config.json's quant_method. Lists
// of what is not quantized (modules_to_not_convert, ignore) need no reading: such a weight is there under its
// own name.
#include "model/quantized_weights/quantized_weight.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/error.h"
#include "io/hf_directory.h"
#include "io/printable.h"
#include "model/quantized_weights/parts.h"
#include "model/quantized_weights/schemes.h"

namespace millrace {
namespace {

constexpr std::array<std::string_view, 9> kMethods = {"gptq",         "awq",          "compressed-tensors",
                                                      "bitsandbytes", "fp8",          "fbgemm_fp8",
                                                      "modelopt",     "modelopt_fp4", "mxfp4"};

std::string module_of(const std::string& weight) { return weight.substr(0, weight.size() - 7); }

[[noreturn]] void refuse(const io::Checkpoint& checkpoint, const std::string& what,
                         const std::string& expected) {
  throw_error(
      ErrorCode::kUnsupported,
      "{}: quantization_config: found {}, expected {}: take the unquantized model or a GGUF file of it",
      checkpoint.path(), what, expected);
}

bool is_float(const io::StoredTensor& tensor) {
  return tensor.dtype == "F32" || tensor.dtype == "F16" || tensor.dtype == "BF16";
}

// The tensor is there under its own name, but holds codes.
std::optional<QuantizedWeight> find_codes(const Parts& parts, const io::StoredTensor& weight,
                                          const std::string& method, const nlohmann::json& config,
                                          int64_t rows, int64_t cols) {
  const bool scaled = parts.find("weight_scale") != nullptr;
  if (weight.dtype == "U8") {
    if (parts.find("weight_scale_2") != nullptr) return read_packed_floats(parts, config, rows, cols);
    if (method == "bitsandbytes") return read_bitsandbytes_4bit(parts, config, rows, cols);
  }
  if (weight.dtype == "I8") {
    if (parts.find("SCB") != nullptr) return read_bitsandbytes_int8(parts, config, rows, cols);
    if (method == "compressed-tensors") return read_int8(parts, config, rows, cols);
  }
  if (is_float(weight) && scaled && method == "compressed-tensors") {
    parts.unsupported("weight",
                      "floats that are quantized anew in every step (a model that is not compressed)");
  }
  return std::nullopt;
}

}  // namespace

std::optional<QuantizedWeight> find_quantized(const io::Checkpoint& checkpoint, const std::string& weight,
                                              int64_t rows, int64_t cols) {
  if (!checkpoint.hf || !weight.ends_with(".weight")) return std::nullopt;
  const Parts parts(checkpoint, module_of(weight));
  const nlohmann::json& config = quantization_config(checkpoint);
  const std::string method = quantization_method(checkpoint);
  if (parts.find("qweight") != nullptr) {
    if (method == "gptq") return read_gptq(parts, config, rows, cols);
    if (method == "awq") return read_awq(parts, config, rows, cols);
    parts.unsupported("qweight", fmt::format("packed by quant_method {}", io::printable(method)));
  }
  if (const io::StoredTensor* packed = parts.find("weight_packed")) {
    return packed->dtype == "U8" ? read_packed_floats(parts, config, rows, cols)
                                 : read_packed_integers(parts, config, rows, cols);
  }
  if (const io::StoredTensor* stored = parts.find("weight")) {
    return find_codes(parts, *stored, method, config, rows, cols);
  }
  if (method.empty()) return std::nullopt;
  // Not there in any form we know: what lies in its place says most.
  for (const TensorView& view : checkpoint.tensors()) {
    if (!view.name.starts_with(module_of(weight) + ".") || view.name == parts.name("bias")) continue;
    throw_error(ErrorCode::kUnsupported,
                "{}: tensor {}: part of a weight packed by quant_method {}, which is not supported: take the "
                "unquantized model or a GGUF file of it",
                checkpoint.path(), view.name, io::printable(method));
  }
  return std::nullopt;
}

bool has_weight(const io::Checkpoint& checkpoint, const std::string& weight) {
  if (!checkpoint.hf || !weight.ends_with(".weight")) return checkpoint.find_tensor(weight) != nullptr;
  const Parts parts(checkpoint, module_of(weight));
  return parts.find("weight") != nullptr || parts.find("qweight") != nullptr ||
         parts.find("weight_packed") != nullptr;
}

void check_quantization(const io::Checkpoint& checkpoint) {
  const nlohmann::json& config = quantization_config(checkpoint);
  const std::string method = quantization_method(checkpoint);
  if (method.empty()) return;
  if (std::find(kMethods.begin(), kMethods.end(), method) == kMethods.end()) {
    refuse(checkpoint, "quant_method " + io::printable(method),
           fmt::format("one of {}", fmt::join(kMethods, ", ")));
  }
  const std::string format = text_or(config, "checkpoint_format", "gptq");
  const bool marlin = config.contains("is_marlin_format") && config["is_marlin_format"] == true;
  if (method == "gptq" && (marlin || (format != "gptq" && format != "gptq_v2"))) {
    refuse(checkpoint, "checkpoint_format " + io::printable(marlin ? "marlin" : format), "gptq or gptq_v2");
  }
  const std::string version = text_or(config, "version", "gemm");
  if (method == "awq" && version != "gemm") refuse(checkpoint, "version " + io::printable(version), "gemm");
  const auto transform = config.find("transform_config");
  if (transform != config.end() && !transform->empty()) {
    refuse(checkpoint, "a transform_config", "weights that need no rotation of activations");
  }
  if (method != "awq") return;
  for (const TensorView& view : checkpoint.tensors()) {
    if (!view.name.ends_with(".act.scales")) continue;
    throw_error(
        ErrorCode::kUnsupported,
        "{}: tensor {}: scales of activations are not supported: take the unquantized model or a GGUF "
        "file of it",
        checkpoint.path(), view.name);
  }
}

}  // namespace millrace
