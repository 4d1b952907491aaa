// Products of plain matrices on a CPU, the part of an instruction set: the product of two panels of floats.
// dense_gemm.cpp cuts matrices into them, dense_pack.h fills them.
//
//     C[m][64] (+)= sum_k A[m, k] B[k][64]
//
// Lanes are 64 columns of B; elements of A are broadcast from where they lie. An output is one chain of fused
// multiply-adds over k in order: the same bits in any block and on any instruction set.
#pragma once

#include <stdint.h>

#include "kernels/cpu/matmul/dense_task.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// Sums in registers: 12 x 2 of 32 (AVX-512), 6 x 1 of two or four registers each (AVX2: 12 of 16, NEON: 24
// of 32).
#if defined(MILLRACE_SIMD_AVX512)
inline constexpr int kPanelM = 12, kPanelN = 2;
#else
inline constexpr int kPanelM = 6, kPanelN = 1;
#endif

template <int kM, int kN>
[[gnu::always_inline]] inline void panel_block(const DensePanel& p, int64_t row, int64_t lane) {
  V16 sum[kM][kN];
  float* c = p.c + row * kDenseLanes + lane;
  unroll<kM>([&](auto m) __attribute__((always_inline)) {
    unroll<kN>([&](auto n) __attribute__((always_inline)) {
      sum[m][n] = p.add ? Simd::load(c + m * kDenseLanes + n * kLanes) : Simd::zero();
    });
  });
  const float* a = p.a + row * p.a_row_stride;
  const float* b = p.b + lane;
  for (int64_t k = 0; k < p.depth; ++k) {
    V16 lanes[kN];
    unroll<kN>([&](auto n) __attribute__((always_inline)) {
      lanes[n] = Simd::load(b + k * kDenseLanes + n * kLanes);
    });
    unroll<kM>([&](auto m) __attribute__((always_inline)) {
      const V16 by = Simd::broadcast(a[m * p.a_row_stride + k * p.a_k_stride]);
      unroll<kN>([&](auto n)
                     __attribute__((always_inline)) { sum[m][n] = Simd::fma(by, lanes[n], sum[m][n]); });
    });
  }
  unroll<kM>([&](auto m) __attribute__((always_inline)) {
    unroll<kN>([&](auto n) __attribute__((always_inline)) {
      Simd::store(c + m * kDenseLanes + n * kLanes, sum[m][n]);
    });
  });
}

void dense_panel(const DensePanel& p) {
  constexpr int kWide = kDenseLanes / kLanes;
  if (p.rows == 1 && p.lanes == kDenseLanes) return panel_block<1, kWide>(p, 0, 0);
  for (int64_t lane = 0; lane < p.lanes; lane += kPanelN * kLanes) {
    int64_t row = 0;
    for (; row + kPanelM <= p.rows; row += kPanelM) panel_block<kPanelM, kPanelN>(p, row, lane);
    for (; row + 4 <= p.rows; row += 4) panel_block<4, kPanelN>(p, row, lane);
    for (; row < p.rows; ++row) panel_block<1, kPanelN>(p, row, lane);
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
