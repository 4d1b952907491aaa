// Products with units of four-bit weights (lowbit_task.h) on a CPU: a few rows with what is in registers, and
// units widened to the panels of dense_panel.h for many. An output is one chain of fused multiply-adds over
// the columns in order either way: the same bits.
//
// Roofline of one row: sixteen weights of MXFP4 are a shift, a permutation, a product and a fused
// multiply-add, two cycles of two ports: 4.25 bytes a cycle and core, where a core reads 3 to 4.
#pragma once

#include <stdint.h>

#include "kernels/cpu/matmul/dense_task.h"
#include "kernels/cpu/matmul/lowbit_codes.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// kM rows by kGroups sixteens of rows of weights.
template <LowbitFormat kFormat, int kM, int kGroups>
void lowbit_few(const LowbitRows& t, int64_t m, int row) {
  V16 sum[kM][kGroups];
  unroll<kM>([&](auto r) { unroll<kGroups>([&](auto g) { sum[r][g] = Simd::zero(); }); });
  const uint8_t* unit = t.units;
  for (int64_t k = 0; k < t.columns; k += kLowbitUnitColumns, unit += lowbit_unit_bytes(kFormat)) {
    const int64_t columns = t.columns - k < kLowbitUnitColumns ? t.columns - k : kLowbitUnitColumns;
    const float* x = t.x + m * t.x_stride + k;
    each_lowbit_column<kFormat, kGroups>(
        unit, row, columns, [&](int64_t c, const V16(&w)[kGroups]) __attribute__((always_inline)) {
          unroll<kM>([&](auto r) __attribute__((always_inline)) {
            const V16 by = Simd::broadcast(x[r * t.x_stride + c]);
            unroll<kGroups>([&](auto g) __attribute__((always_inline)) {
              sum[r][g] = Simd::fma(w[g], by, sum[r][g]);
            });
          });
        });
  }
  unroll<kM>([&](auto r) {
    unroll<kGroups>(
        [&](auto g) { Simd::store(t.sums + (m + r) * kLowbitUnitRows + row + g * kLanes, sum[r][g]); });
  });
}

// Sums in registers: 4 x 4 of 32 (AVX-512), 2 x 2 of 16 and 32 (AVX2, NEON).
#if defined(MILLRACE_SIMD_AVX512)
inline constexpr int kLowbitM = 4, kLowbitGroups = 4;
#else
inline constexpr int kLowbitM = 2, kLowbitGroups = 2;
#endif

template <LowbitFormat kFormat>
void lowbit_rows_of(const LowbitRows& t) {
  for (int row = 0; row < kLowbitUnitRows; row += kLowbitGroups * kLanes) {
    int64_t m = 0;
    for (; m + kLowbitM <= t.rows; m += kLowbitM) lowbit_few<kFormat, kLowbitM, kLowbitGroups>(t, m, row);
    for (; m < t.rows; ++m) lowbit_few<kFormat, 1, kLowbitGroups>(t, m, row);
  }
}

void lowbit_rows(const LowbitRows& t) {
  switch (t.format) {
    case LowbitFormat::kMXFP4:
      return lowbit_rows_of<LowbitFormat::kMXFP4>(t);
    case LowbitFormat::kNVFP4:
      return lowbit_rows_of<LowbitFormat::kNVFP4>(t);
    case LowbitFormat::kInt4By32:
      return lowbit_rows_of<LowbitFormat::kInt4By32>(t);
    case LowbitFormat::kInt4By128:
      return lowbit_rows_of<LowbitFormat::kInt4By128>(t);
  }
}

template <LowbitFormat kFormat>
void lowbit_widen_of(const uint8_t* unit, int64_t columns, float* to) {
  for (int row = 0; row < kLowbitUnitRows; row += 2 * kLanes) {
    each_lowbit_column<kFormat, 2>(
        unit, row, columns, [&](int64_t c, const V16(&w)[2]) __attribute__((always_inline)) {
          Simd::store(to + c * kDenseLanes + row, w[0]);
          Simd::store(to + c * kDenseLanes + row + kLanes, w[1]);
        });
  }
}

// The first `columns` of a unit to [columns][64].
void lowbit_widen(LowbitFormat format, const uint8_t* unit, int64_t columns, float* to) {
  switch (format) {
    case LowbitFormat::kMXFP4:
      return lowbit_widen_of<LowbitFormat::kMXFP4>(unit, columns, to);
    case LowbitFormat::kNVFP4:
      return lowbit_widen_of<LowbitFormat::kNVFP4>(unit, columns, to);
    case LowbitFormat::kInt4By32:
      return lowbit_widen_of<LowbitFormat::kInt4By32>(unit, columns, to);
    case LowbitFormat::kInt4By128:
      return lowbit_widen_of<LowbitFormat::kInt4By128>(unit, columns, to);
  }
}

// `count` codes of a row, the even column in a byte's lower half, times a scale for every `block` of them;
// both are whole sixteens.
void fp4_widen(const uint8_t* codes, const float* scales, int64_t block, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const V16 value = LowbitCodes::e2m1<0>(LowbitCodes::spread(codes + i / 2));
    Simd::store(to + i, Simd::mul(value, Simd::broadcast(scales[i / block])));
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
