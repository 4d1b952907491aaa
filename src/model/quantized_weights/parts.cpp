#include "model/quantized_weights/parts.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>

#include "base/error.h"
#include "io/hf_directory.h"

namespace millrace {

std::string describe(const io::StoredTensor& tensor) {
  return fmt::format("{} [{}]", tensor.dtype,
                     fmt::join(tensor.shape.begin(), tensor.shape.begin() + tensor.rank, ", "));
}

int64_t elements_of(const io::StoredTensor& tensor) {
  int64_t count = 1;
  for (int i = 0; i < tensor.rank; ++i) count *= tensor.shape[i];
  return count;
}

Floats floats_of(const io::StoredTensor& tensor) {
  const DType type = tensor.dtype == "F16"       ? DType::kF16
                     : tensor.dtype == "BF16"    ? DType::kBF16
                     : tensor.dtype == "F8_E4M3" ? DType::kF8E4M3
                                                 : DType::kF32;
  return {type, tensor.data, elements_of(tensor)};
}

const io::StoredTensor* Parts::find(std::string_view part) const {
  return checkpoint_.hf->find_stored(name(part));
}

const io::StoredTensor& Parts::require(std::string_view part,
                                       std::initializer_list<std::string_view> types) const {
  const io::StoredTensor* tensor = find(part);
  const std::string expected = fmt::format("{}", fmt::join(types, " or "));
  if (tensor == nullptr) fail(part, "nothing", expected + " beside the codes of the same weight");
  if (std::find(types.begin(), types.end(), tensor->dtype) == types.end()) {
    fail(part, describe(*tensor), expected);
  }
  return *tensor;
}

const io::StoredTensor& Parts::require(std::string_view part, std::initializer_list<std::string_view> types,
                                       const std::vector<int64_t>& shape) const {
  const io::StoredTensor& tensor = require(part, types);
  if (!std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.begin() + tensor.rank)) {
    fail(part, describe(tensor), fmt::format("{} [{}]", tensor.dtype, fmt::join(shape, ", ")));
  }
  return tensor;
}

void Parts::fail(std::string_view part, const std::string& found, const std::string& expected) const {
  throw_error(ErrorCode::kBadInput, "{}: tensor {}: found {}, expected {}", checkpoint_.path(), name(part),
              found, expected);
}

void Parts::unsupported(std::string_view part, const std::string& what) const {
  throw_error(ErrorCode::kUnsupported,
              "{}: tensor {}: {}, which is not supported: take the unquantized model or a GGUF file of it",
              checkpoint_.path(), name(part), what);
}

const nlohmann::json& quantization_config(const io::Checkpoint& checkpoint) {
  static const nlohmann::json none;
  if (!checkpoint.hf) return none;
  for (const char* key : {"quantization_config", "compression_config"}) {
    const auto found = checkpoint.hf->config.find(key);
    if (found != checkpoint.hf->config.end() && found->is_object()) return *found;
  }
  return none;
}

int64_t integer_or(const nlohmann::json& config, const char* key, int64_t otherwise) {
  if (!config.is_object() || !config.contains(key) || !config[key].is_number_integer()) return otherwise;
  return config[key].get<int64_t>();
}

std::string text_or(const nlohmann::json& config, const char* key, const std::string& otherwise) {
  if (!config.is_object() || !config.contains(key) || !config[key].is_string()) return otherwise;
  std::string text = config[key].get<std::string>();
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

std::string quantization_method(const io::Checkpoint& checkpoint) {
  return text_or(quantization_config(checkpoint), "quant_method", "");
}

}  // namespace millrace
