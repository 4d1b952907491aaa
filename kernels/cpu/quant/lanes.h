// Lanes: four floats that go through the same arithmetic, in the compilers' vector types, so that the
// searches of the encoders are written once and are vector code on every machine. A lane is a block (or a
// sub-block), not an element: what a block needs of its own (extremes, sums, its best scale) is then never a
// sum across a vector, and every lane computes what a scalar loop over its block would.
#pragma once

#include <cstdint>

namespace millrace::quant {

using Lanes = float __attribute__((vector_size(16)));
using LaneInts = int32_t __attribute__((vector_size(16)));  // also masks: all bits or none
inline constexpr int kNumLanes = 4;

inline Lanes all_lanes(float x) { return Lanes{x, x, x, x}; }

inline Lanes select(LaneInts mask, Lanes yes, Lanes no) {
  return reinterpret_cast<Lanes>((mask & reinterpret_cast<LaneInts>(yes)) |
                                 (~mask & reinterpret_cast<LaneInts>(no)));
}
inline Lanes lane_min(Lanes a, Lanes b) { return select(a < b, a, b); }
inline Lanes lane_max(Lanes a, Lanes b) { return select(a > b, a, b); }
inline Lanes clamp_lanes(Lanes x, float low, float high) {
  return lane_min(lane_max(x, all_lanes(low)), all_lanes(high));
}
inline Lanes abs_lanes(Lanes x) {
  return reinterpret_cast<Lanes>(reinterpret_cast<LaneInts>(x) & (LaneInts{} + 0x7fffffff));
}

// To the nearest integer, ties to even, for |x| < 2^22: the sum has no bits left below one.
inline Lanes round_lanes(Lanes x) {
  const Lanes magic = all_lanes(12582912.0f);
  return (x + magic) - magic;
}

// a / b, and 0 where b is 0.
inline Lanes divide_or_zero(Lanes a, Lanes b) {
  const LaneInts good = b != all_lanes(0.0f);
  return select(good, a / select(good, b, all_lanes(1.0f)), all_lanes(0.0f));
}

// Element j of four neighbouring blocks of `count` floats, as out[j]. count is a multiple of 4.
inline void transpose_in(const float* x, int count, Lanes* out) {
  for (int j = 0; j < count; ++j) {
    out[j] = Lanes{x[j], x[j + count], x[j + 2 * count], x[j + 3 * count]};
  }
}

}  // namespace millrace::quant
