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

#include "quant/blocks.h"
#include "quant/encode_table.h"

namespace millrace::quant {
namespace {

#include "quant/encode_simd_avx2.h"
// Bare comments keep clang-format from sorting what must stay in order.
#include "quant/encode_search.h"
//
#include "quant/encode_plain.h"
//
#include "quant/encode_k.h"
//
#include "quant/encode_entries.h"

}  // namespace

constinit const EncodeTable kAvx2Encoders = make_table("avx2");

}  // namespace millrace::quant
