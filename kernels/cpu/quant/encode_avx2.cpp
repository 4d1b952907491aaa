// The encoders with AVX2, FMA and F16C; compiled with their flags. Everything is in the anonymous namespace
// and no STL is used: an inline function compiled with these flags must not be picked by the linker for other
// files.
#include <immintrin.h>

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

#include "kernels/cpu/simd/encode_avx2.h"
// Bare comments keep clang-format from sorting what must stay in order.
#include "kernels/cpu/quant/encode_search.h"
//
#include "kernels/cpu/quant/encode_plain.h"
//
#include "kernels/cpu/quant/encode_k.h"
//
#include "kernels/cpu/quant/encode_entries.h"

}  // namespace

constinit const EncodeTable kAvx2Encoders = make_table("avx2");

}  // namespace millrace::quant
