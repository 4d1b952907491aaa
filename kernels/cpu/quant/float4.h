// Float4: four floats that go through the same arithmetic, in the compilers' vector types, so that the
// searches of the encoders are written once and are vector code on every machine. A lane is a block (or a
// sub-block), not an element: what a block needs of its own (extremes, sums, its best scale) is then never a
// sum across a vector, and every lane computes what a scalar loop over its block would.
#pragma once

#include <cstdint>

namespace millrace::quant {

using Float4 = float __attribute__((vector_size(16)));
using Int4 = int32_t __attribute__((vector_size(16)));  // also masks: all bits or none
inline constexpr int kFloat4Lanes = 4;

inline Float4 all4(float x) { return Float4{x, x, x, x}; }

inline Float4 select(Int4 mask, Float4 yes, Float4 no) {
  return reinterpret_cast<Float4>((mask & reinterpret_cast<Int4>(yes)) |
                                  (~mask & reinterpret_cast<Int4>(no)));
}
inline Float4 min4(Float4 a, Float4 b) { return select(a < b, a, b); }
inline Float4 max4(Float4 a, Float4 b) { return select(a > b, a, b); }
inline Float4 clamp4(Float4 x, float low, float high) { return min4(max4(x, all4(low)), all4(high)); }
inline Float4 abs4(Float4 x) {
  return reinterpret_cast<Float4>(reinterpret_cast<Int4>(x) & (Int4{} + 0x7fffffff));
}

// To the nearest integer, ties to even, for |x| < 2^22: the sum has no bits left below one.
inline Float4 round4(Float4 x) {
  const Float4 magic = all4(12582912.0f);
  return (x + magic) - magic;
}

// a / b, and 0 where b is 0.
inline Float4 divide_or_zero(Float4 a, Float4 b) {
  const Int4 good = b != all4(0.0f);
  return select(good, a / select(good, b, all4(1.0f)), all4(0.0f));
}

// Element j of four neighbouring blocks of `count` floats, as out[j]. count is a multiple of 4.
inline void transpose_in(const float* x, int count, Float4* out) {
  for (int j = 0; j < count; ++j) {
    out[j] = Float4{x[j], x[j + count], x[j + 2 * count], x[j + 3 * count]};
  }
}

}  // namespace millrace::quant
