// Sixteen elements of a FloatRow as floats and back, and loops over a row whose last elements are fewer.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/tables/fused_kernels.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

[[gnu::always_inline]] inline V16 load16(const FloatRow& row, int64_t i) {
  if (row.type == MR_BF16) return Simd::load_bf16(static_cast<const uint16_t*>(row.data) + i);
  if (row.type == MR_F32) return Simd::load(static_cast<const float*>(row.data) + i);
  return Simd::load_f16(static_cast<const uint16_t*>(row.data) + i);
}
[[gnu::always_inline]] inline void store16(const FloatRow& row, int64_t i, V16 x) {
  if (row.type == MR_BF16) return Simd::store_bf16(static_cast<uint16_t*>(row.data) + i, x);
  if (row.type == MR_F32) return Simd::store(static_cast<float*>(row.data) + i, x);
  Simd::store_f16(static_cast<uint16_t*>(row.data) + i, x);
}

// Sixteen lanes of whole numbers and their floats, by the compilers' own vectors: what they make of it has
// the width of the instruction set.
using U32x16 = uint32_t __attribute__((vector_size(64)));
using F32x16 = float __attribute__((vector_size(64)));
using U64x8 = uint64_t __attribute__((vector_size(64)));

// The n <= 16 elements from i on; `fill` behind them.
inline V16 load_last(const FloatRow& row, int64_t i, int64_t n, float fill) {
  V16 x;
  if (row.type == MR_F32) {
    x = load_tail<LoadF32>(static_cast<const float*>(row.data) + i, n);
  } else if (row.type == MR_BF16) {
    x = load_tail<LoadBF16>(static_cast<const uint16_t*>(row.data) + i, n);
  } else {
    x = load_tail<LoadF16>(static_cast<const uint16_t*>(row.data) + i, n);
  }
  if (fill == 0.0f) return x;
  float lanes[kLanes];
  Simd::store(lanes, x);
  for (int64_t j = n; j < kLanes; ++j) lanes[j] = fill;
  return Simd::load(lanes);
}
inline void store_last(const FloatRow& row, int64_t i, int64_t n, V16 x) {
  float lanes[kLanes];
  const FloatRow whole{lanes, row.type};
  store16(whole, 0, x);
  const int64_t size = row.type == MR_F32 ? 4 : 2;
  __builtin_memcpy(static_cast<uint8_t*>(row.data) + i * size, lanes, static_cast<size_t>(n * size));
}

// Sixteen at once, or the last n of a row: what the loops below hand to their bodies.
struct Whole {
  [[gnu::always_inline]] V16 load(const FloatRow& row, int64_t i, float = 0.0f) const {
    return load16(row, i);
  }
  [[gnu::always_inline]] void store(const FloatRow& row, int64_t i, V16 x) const { store16(row, i, x); }
  [[gnu::always_inline]] V16 mask(V16 x) const { return x; }
  int64_t count() const { return kLanes; }
};
struct Last {
  int64_t n;
  V16 load(const FloatRow& row, int64_t i, float fill = 0.0f) const { return load_last(row, i, n, fill); }
  void store(const FloatRow& row, int64_t i, V16 x) const { store_last(row, i, n, x); }
  // Zeros behind the last.
  V16 mask(V16 x) const {
    float lanes[kLanes];
    Simd::store(lanes, x);
    for (int64_t j = n; j < kLanes; ++j) lanes[j] = 0.0f;
    return Simd::load(lanes);
  }
  int64_t count() const { return n; }
};

// f(Whole or Last, first element)
template <class F>
[[gnu::always_inline]] inline void each16_of(int64_t cols, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= cols; i += kLanes) f(Whole{}, i);
  if (i < cols) f(Last{cols - i}, i);
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
