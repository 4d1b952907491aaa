// Sixteen elements of a FloatRow as floats and back, and loops over a row whose last elements are fewer.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
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

[[gnu::always_inline]] inline uint8_t* place_of(const FloatRow& row, int64_t i) {
  return static_cast<uint8_t*>(row.data) + i * (row.type == MR_F32 ? 4 : 2);
}

// What a loop over a row that is in the cache asks for beside it: the same elements of the row after it, so
// that memory is not idle until that row's first pass.
[[gnu::always_inline]] inline void prefetch16(const FloatRow& row, int64_t i) {
  __builtin_prefetch(place_of(row, i), 0, 2);
}

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
  __builtin_memcpy(place_of(row, i), lanes, static_cast<size_t>(n * (row.type == MR_F32 ? 4 : 2)));
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

// What goes side by side where an element is a long chain of operations and sixteen are one register: its
// chains are in the processor's sight together, in each other's gaps.
#if defined(MILLRACE_SIMD_AVX512)
inline constexpr int kChains = 4;
#else
inline constexpr int kChains = 1;
#endif

// y[i] = f(x[i]...), y may be an x.
template <class F, class... Rows>
[[gnu::always_inline]] inline void map16_of(int64_t cols, FloatRow y, const F& f, Rows... x) {
  int64_t i = 0;
  for (; i + kChains * kLanes <= cols; i += kChains * kLanes) {
    V16 to[kChains];
    unroll<kChains>([&](auto c) __attribute__((always_inline)) { to[c] = f(load16(x, i + c * kLanes)...); });
    unroll<kChains>([&](auto c) __attribute__((always_inline)) { store16(y, i + c * kLanes, to[c]); });
  }
  const FloatRow rest{place_of(y, i), y.type};
  each16_of(cols - i, [&](const auto& part, int64_t j) {
    part.store(rest, j, f(part.load({place_of(x, i), x.type}, j)...));
  });
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
