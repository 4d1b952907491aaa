// The encoders with base ARMv8.
#include <arm_neon.h>

#include <cfloat>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <utility>

#include "quant/blocks.h"
#include "quant/encode_table.h"

namespace millrace::quant {
namespace {

#include "quant/encode_simd_neon.h"
// Bare comments keep clang-format from sorting what must stay in order.
#include "quant/encode_search.h"
//
#include "quant/encode_plain.h"
//
#include "quant/encode_k.h"
//
#include "quant/encode_entries.h"

}  // namespace

constinit const EncodeTable kNeonEncoders = make_table("neon");

}  // namespace millrace::quant
