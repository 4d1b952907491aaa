// The encoders with the dot product of ARMv8.2.
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

constinit const EncodeTable kNeonDotprodEncoders = make_table("neon_dotprod");

}  // namespace millrace::quant
