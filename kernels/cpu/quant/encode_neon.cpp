// The encoders with base ARMv8.
#include <arm_neon.h>

#include <cfloat>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <utility>

#include "kernels/cpu/quant/encode_table.h"
#include "kernels/quant/blocks.h"

namespace millrace::quant {
namespace {

#include "kernels/cpu/simd/encode_neon.h"
// Bare comments keep clang-format from sorting what must stay in order.
#include "kernels/cpu/quant/encode_search.h"
//
#include "kernels/cpu/quant/encode_plain.h"
//
#include "kernels/cpu/quant/encode_k.h"
//
#include "kernels/cpu/quant/encode_entries.h"

}  // namespace

constinit const EncodeTable kNeonEncoders = make_table("neon");

}  // namespace millrace::quant
