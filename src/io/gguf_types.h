// Tensor type numbers of GGUF files, and which of them this engine computes with.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tensor/dtype.h"

namespace millrace::io {

// Types of metadata values.
enum class GgufType : uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
};

inline constexpr uint32_t kGgufVersion = 3;
inline constexpr uint32_t kGgufDefaultAlignment = 32;
inline constexpr int kGgufMaxRank = 4;

std::optional<DType> dtype_of_gguf(uint32_t number);
std::optional<uint32_t> gguf_of_dtype(DType type);  // nothing for types GGUF does not have
// "IQ2_XXS" for 16, empty for a number nobody has defined.
std::string_view gguf_type_name(uint32_t number);
// "F32 0, F16 1, ...": for messages.
std::string supported_gguf_types();

}  // namespace millrace::io
