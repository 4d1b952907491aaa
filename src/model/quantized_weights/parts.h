// The tensors of one packed weight, beside each other under one name: finding them and saying what is wrong
// with them. Internal to quantized_weights.
#pragma once

#include <cstring>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/float_bits.h"
#include "io/checkpoint.h"
#include "io/safetensors.h"
#include "tensor/dtype.h"

namespace millrace {

template <class T>
T load_number(const std::byte* data, int64_t index) {
  T value;
  std::memcpy(&value, data + index * static_cast<int64_t>(sizeof(T)), sizeof value);
  return value;
}

class Parts {
 public:
  // `module` is what the names begin with: "model.layers.0.mlp.up_proj".
  Parts(const io::Checkpoint& checkpoint, std::string module)
      : checkpoint_(checkpoint), module_(std::move(module)) {}

  std::string name(std::string_view part) const { return module_ + "." + std::string(part); }
  const io::StoredTensor* find(std::string_view part) const;
  // Must be there, of one of these types.
  const io::StoredTensor& require(std::string_view part, std::initializer_list<std::string_view> types) const;
  // And of this shape.
  const io::StoredTensor& require(std::string_view part, std::initializer_list<std::string_view> types,
                                  const std::vector<int64_t>& shape) const;

  // "PATH: tensor NAME: found ..., expected ..."
  [[noreturn]] void fail(std::string_view part, const std::string& found, const std::string& expected) const;
  [[noreturn]] void unsupported(std::string_view part, const std::string& what) const;

 private:
  const io::Checkpoint& checkpoint_;
  std::string module_;
};

// "I32 [64, 8]"
std::string describe(const io::StoredTensor& tensor);
int64_t elements_of(const io::StoredTensor& tensor);

// The numbers of a tensor of F32, F16, BF16 or F8_E4M3.
struct Floats {
  DType type = DType::kF32;
  const std::byte* data = nullptr;
  int64_t count = 0;

  float at(int64_t index) const {
    switch (type) {
      case DType::kF16:
        return to_float(load_number<Half>(data, index));
      case DType::kBF16:
        return to_float(load_number<BFloat16>(data, index));
      case DType::kF8E4M3:
        return to_float(load_number<Fp8E4M3>(data, index));
      default:
        return load_number<float>(data, index);
    }
  }
};
Floats floats_of(const io::StoredTensor& tensor);

// quantization_config of config.json; null where there is none.
const nlohmann::json& quantization_config(const io::Checkpoint& checkpoint);
// A field of it (text in lower case), or `otherwise` where it is absent or of another type.
int64_t integer_or(const nlohmann::json& config, const char* key, int64_t otherwise);
std::string text_or(const nlohmann::json& config, const char* key, const std::string& otherwise);
// Its quant_method; empty where there is none.
std::string quantization_method(const io::Checkpoint& checkpoint);

}  // namespace millrace
