// Products of a few rows with a plain matrix on a CPU: elements go from where they lie to registers, widened,
// and transposed where their rows are columns of the product. An output is the same chain of fused
// multiply-adds over k in order as in dense_panel.h. The bytes of the matrix are the limit.
#pragma once

#include <stdint.h>

#include "kernels/cpu/matmul/dense_pack.h"
#include "kernels/cpu/matmul/dense_task.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

inline float* few_sums(const DenseFew& t, int64_t row, int64_t column) {
  return t.sums + column / kDenseLanes * t.sums_stride + row * kDenseLanes + column % kDenseLanes;
}

// Sixteen columns that lie as rows.
template <class Load, int kM>
void few_transposed(const DenseFew& t, int64_t row, int64_t column) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(typename Load::Stored));
  constexpr int64_t kAhead = 1024;  // bytes: a few turns of sixteen rows
  V16 sum[kM];
  unroll<kM>([&](auto m) { sum[m] = t.add ? Simd::load(few_sums(t, row + m, column)) : Simd::zero(); });
  const float* x = t.x + row * t.x_stride;
  for (int64_t k = 0; k < t.depth; k += kLanes) {
    V16 v[kLanes];
    load_transposed<Load>(t.b + column * t.stride + k * kBytes, t.stride, t.columns - column, t.depth - k,
                          kAhead, v);
    const auto multiply = [&](int64_t i, V16 by) __attribute__((always_inline)) {
      unroll<kM>([&](auto m) __attribute__((always_inline)) {
        sum[m] = Simd::fma(by, Simd::broadcast(x[m * t.x_stride + k + i]), sum[m]);
      });
    };
    if (t.depth - k >= kLanes) {
      unroll<kLanes>([&](auto i) __attribute__((always_inline)) { multiply(i, v[i]); });
    } else {
      for (int64_t i = 0; i < t.depth - k; ++i) multiply(i, v[i]);
    }
  }
  unroll<kM>([&](auto m) { Simd::store(few_sums(t, row + m, column), sum[m]); });
}

// kN sixteens of columns, of the last of which `count` columns exist.
template <class Load, int kM, int kN>
void few_in_order(const DenseFew& t, int64_t row, int64_t column, int64_t count) {
  using Stored = typename Load::Stored;
  constexpr int64_t kAhead = 8;  // rows
  V16 sum[kM][kN];
  unroll<kM>([&](auto m) {
    unroll<kN>([&](auto n) {
      sum[m][n] = t.add ? Simd::load(few_sums(t, row + m, column + n * kLanes)) : Simd::zero();
    });
  });
  const float* x = t.x + row * t.x_stride;
  for (int64_t k = 0; k < t.depth; ++k) {
    const auto* b = reinterpret_cast<const Stored*>(t.b + k * t.stride) + column;
    const auto* next = reinterpret_cast<const Stored*>(t.b + (k + kAhead) * t.stride) + column;
    V16 by[kM];
    unroll<kM>([&](auto m) { by[m] = Simd::broadcast(x[m * t.x_stride + k]); });
    unroll<kN>([&](auto n) __attribute__((always_inline)) {
      __builtin_prefetch(next + n * kLanes, 0, 2);
      const V16 v =
          n == kN - 1 && count < kLanes ? load_tail<Load>(b + n * kLanes, count) : Load::load(b + n * kLanes);
      unroll<kM>([&](auto m) __attribute__((always_inline)) { sum[m][n] = Simd::fma(v, by[m], sum[m][n]); });
    });
  }
  unroll<kM>([&](auto m) {
    unroll<kN>([&](auto n) { Simd::store(few_sums(t, row + m, column + n * kLanes), sum[m][n]); });
  });
}

// Sums in registers: 16 (AVX-512), 8 and 16 (AVX2 and NEON, of two and four registers each).
#if defined(MILLRACE_SIMD_AVX512)
inline constexpr int kFewSums = 16;
#else
inline constexpr int kFewSums = 4;
#endif

template <class Load, int kM>
void few_rows(const DenseFew& t, int64_t row) {
  constexpr int kN = kFewSums / kM;
  int64_t column = 0;
  if (t.transposed) {
    for (; column < t.columns; column += kLanes) few_transposed<Load, kM>(t, row, column);
    return;
  }
  for (; column + kN * kLanes <= t.columns; column += kN * kLanes)
    few_in_order<Load, kM, kN>(t, row, column, kLanes);
  for (; column < t.columns; column += kLanes) few_in_order<Load, kM, 1>(t, row, column, t.columns - column);
}

void dense_few(const DenseFew& t) {
  with_loader(t.type, [&](auto load) {
    using Load = decltype(load);
    int64_t row = 0;
#if defined(MILLRACE_SIMD_AVX512)  // the sums and sixteen transposed vectors fit into registers
    if (t.transposed) {
      for (; row + 8 <= t.rows; row += 8) few_rows<Load, 8>(t, row);
    }
#endif
    for (; row + 4 <= t.rows; row += 4) few_rows<Load, 4>(t, row);
    for (; row < t.rows; ++row) few_rows<Load, 1>(t, row);
  });
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
