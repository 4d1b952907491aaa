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
#include "kernels/cpu/quant/encode_table.h"
#include "kernels/quant/blocks.h"

namespace millrace::quant {
namespace {

#include "kernels/cpu/simd/encode_scalar.h"
// Bare comments keep clang-format from sorting what must stay in order.
#include "kernels/cpu/quant/encode_search.h"
//
#include "kernels/cpu/quant/encode_plain.h"
//
#include "kernels/cpu/quant/encode_k.h"
//
#include "kernels/cpu/quant/encode_entries.h"

}  // namespace

constinit const EncodeTable kScalarEncoders = make_table("scalar");

}  // namespace millrace::quant
