// The table of tensor type numbers. A gap in the numbers is a type that was withdrawn.
#include "io/gguf_types.h"

#include <fmt/core.h>

#include <array>

namespace millrace::io {
namespace {

// Types of our own have numbers that no other program gives to anything: ggml counts up from 0.
constexpr uint32_t kPrivateTypes = 0x4d520000;  // "MR"

struct Row {
  uint32_t number;
  std::string_view name;
  std::optional<DType> type;  // empty: known by name, not supported
};

constexpr std::array kTypes = {
    Row{0, "F32", DType::kF32},
    Row{1, "F16", DType::kF16},
    Row{2, "Q4_0", DType::kQ4_0},
    Row{3, "Q4_1", DType::kQ4_1},
    Row{6, "Q5_0", DType::kQ5_0},
    Row{7, "Q5_1", DType::kQ5_1},
    Row{8, "Q8_0", DType::kQ8_0},
    Row{9, "Q8_1", {}},
    Row{10, "Q2_K", DType::kQ2_K},
    Row{11, "Q3_K", DType::kQ3_K},
    Row{12, "Q4_K", DType::kQ4_K},
    Row{13, "Q5_K", DType::kQ5_K},
    Row{14, "Q6_K", DType::kQ6_K},
    Row{15, "Q8_K", {}},
    Row{16, "IQ2_XXS", DType::kIQ2_XXS},
    Row{17, "IQ2_XS", DType::kIQ2_XS},
    Row{18, "IQ3_XXS", DType::kIQ3_XXS},
    Row{19, "IQ1_S", DType::kIQ1_S},
    Row{20, "IQ4_NL", DType::kIQ4_NL},
    Row{21, "IQ3_S", DType::kIQ3_S},
    Row{22, "IQ2_S", DType::kIQ2_S},
    Row{23, "IQ4_XS", DType::kIQ4_XS},
    Row{24, "I8", {}},
    Row{25, "I16", {}},
    Row{26, "I32", DType::kI32},
    Row{27, "I64", {}},
    Row{28, "F64", {}},
    Row{29, "IQ1_M", DType::kIQ1_M},
    Row{30, "BF16", DType::kBF16},
    Row{31, "Q4_0_4_4", {}},
    Row{32, "Q4_0_4_8", {}},
    Row{33, "Q4_0_8_8", {}},
    Row{34, "TQ1_0", DType::kTQ1_0},
    Row{35, "TQ2_0", DType::kTQ2_0},
    Row{36, "IQ4_NL_4_4", {}},
    Row{37, "IQ4_NL_4_8", {}},
    Row{38, "IQ4_NL_8_8", {}},
    Row{39, "MXFP4", DType::kMXFP4},
    Row{40, "NVFP4", DType::kNVFP4},
    Row{kPrivateTypes, "Q4_Z", DType::kQ4_Z},
};

const Row* find(uint32_t number) {
  for (const Row& row : kTypes) {
    if (row.number == number) return &row;
  }
  return nullptr;
}

}  // namespace

std::optional<DType> dtype_of_gguf(uint32_t number) {
  const Row* row = find(number);
  return row == nullptr ? std::nullopt : row->type;
}

std::optional<uint32_t> gguf_of_dtype(DType type) {
  for (const Row& row : kTypes) {
    if (row.type == type) return row.number;
  }
  return std::nullopt;
}

std::string_view gguf_type_name(uint32_t number) {
  const Row* row = find(number);
  return row == nullptr ? std::string_view{} : row->name;
}

std::string supported_gguf_types() {
  std::string out;
  for (const Row& row : kTypes) {
    if (row.type) out += fmt::format("{}{} {}", out.empty() ? "" : ", ", row.name, row.number);
  }
  return out;
}

}  // namespace millrace::io
