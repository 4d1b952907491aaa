// The encoders in plain C++.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <utility>

#include "base/float_bits.h"
#include "quant/blocks.h"
#include "quant/encode_table.h"

namespace millrace::quant {
namespace {

#include "quant/encode_simd_scalar.h"
// Bare comments keep clang-format from sorting what must stay in order.
#include "quant/encode_search.h"
//
#include "quant/encode_plain.h"
//
#include "quant/encode_k.h"
//
#include "quant/encode_entries.h"

}  // namespace

constinit const EncodeTable kScalarEncoders = make_table("scalar");

}  // namespace millrace::quant
