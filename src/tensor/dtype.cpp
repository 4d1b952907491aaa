#include "tensor/dtype.h"

#include <array>

namespace millrace {
namespace {

constexpr std::array kInfo = {
    DTypeInfo{"f32", 1, 4},      DTypeInfo{"f16", 1, 2},
    DTypeInfo{"bf16", 1, 2},     DTypeInfo{"f8_e4m3", 1, 1},
    DTypeInfo{"q8_0", 32, 34},   DTypeInfo{"q4_0", 32, 18},
    DTypeInfo{"q4_1", 32, 20},   DTypeInfo{"q5_0", 32, 22},
    DTypeInfo{"q5_1", 32, 24},   DTypeInfo{"q4_k", 256, 144},
    DTypeInfo{"q5_k", 256, 176}, DTypeInfo{"q6_k", 256, 210},
    DTypeInfo{"mxfp4", 32, 17},  DTypeInfo{"mxfp4_split", 32, 16},
    DTypeInfo{"q4_z", 32, 18},   DTypeInfo{"i32", 1, 4},
    DTypeInfo{"u8", 1, 1},
};
static_assert(kInfo.size() == static_cast<size_t>(DType::kU8) + 1);

}  // namespace

const DTypeInfo& info(DType type) { return kInfo[static_cast<size_t>(type)]; }

std::optional<DType> parse_dtype(std::string_view name) {
  for (size_t i = 0; i < kInfo.size(); ++i) {
    if (kInfo[i].name == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

}  // namespace millrace
