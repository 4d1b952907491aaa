#include "tensor/dtype.h"

#include <array>

namespace millrace {
namespace {

constexpr std::array kInfo = {
    DTypeInfo{"f32", 1, 4},        DTypeInfo{"f16", 1, 2},           DTypeInfo{"bf16", 1, 2},
    DTypeInfo{"f8_e4m3", 1, 1},    DTypeInfo{"q8_0", 32, 34},        DTypeInfo{"q4_0", 32, 18},
    DTypeInfo{"q4_1", 32, 20},     DTypeInfo{"q5_0", 32, 22},        DTypeInfo{"q5_1", 32, 24},
    DTypeInfo{"q4_k", 256, 144},   DTypeInfo{"q5_k", 256, 176},      DTypeInfo{"q6_k", 256, 210},
    DTypeInfo{"mxfp4", 32, 17},    DTypeInfo{"mxfp4_split", 32, 16}, DTypeInfo{"q4_z", 32, 18},
    DTypeInfo{"q2_k", 256, 84},    DTypeInfo{"q3_k", 256, 110},      DTypeInfo{"iq4_nl", 32, 18},
    DTypeInfo{"iq4_xs", 256, 136}, DTypeInfo{"iq3_xxs", 256, 98},    DTypeInfo{"iq3_s", 256, 110},
    DTypeInfo{"iq2_xxs", 256, 66}, DTypeInfo{"iq2_xs", 256, 74},     DTypeInfo{"iq2_s", 256, 82},
    DTypeInfo{"iq1_s", 256, 50},   DTypeInfo{"iq1_m", 256, 56},      DTypeInfo{"tq1_0", 256, 54},
    DTypeInfo{"tq2_0", 256, 66},   DTypeInfo{"nvfp4", 64, 36},       DTypeInfo{"i32", 1, 4},
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
