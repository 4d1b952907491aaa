// Products of plain matrices on a CPU, the part of an instruction set: elements of an operand to floats, and
// the product of two panels of floats. dense_gemm.cpp cuts matrices into them.
//
//     C[m][64] (+)= sum_k A[m, k] B[k][64]
//
// Lanes are 64 columns of B; elements of A are broadcast from where they lie. An output is one chain of fused
// multiply-adds over k in order: the same bits in any block and on any instruction set.
#pragma once

#include <stdint.h>

#include "kernels/cpu/attention/paged_float.h"
#include "kernels/cpu/matmul/dense_task.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// Sums in registers: 6 x 2 vectors of 32 (AVX-512, NEON: 16 lanes are four registers there), 4 x 1 of 16
// (AVX2: two registers each).
#if defined(MILLRACE_SIMD_AVX512)
inline constexpr int kPanelM = 8, kPanelN = 2;
#else
inline constexpr int kPanelM = 4, kPanelN = 1;
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
  for (int64_t lane = 0; lane < p.lanes; lane += kPanelN * kLanes) {
    int64_t row = 0;
    for (; row + kPanelM <= p.rows; row += kPanelM) panel_block<kPanelM, kPanelN>(p, row, lane);
    for (; row < p.rows; ++row) panel_block<1, kPanelN>(p, row, lane);
  }
}

template <class Load>
void widen_all(const void* from, int64_t count, float* to) {
  const auto* stored = static_cast<const typename Load::Stored*>(from);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Simd::store(to + i, Load::load(stored + i));
  if (i == count) return;
  float tail[kLanes];
  Simd::store(tail, load_tail<Load>(stored + i, count - i));
  for (int64_t j = 0; i + j < count; ++j) to[i + j] = tail[j];
}

struct LoadDenseE4M3 {
  using Stored = uint8_t;
  static V16 load(const uint8_t* p) { return load_e4m3<Simd>(p); }
};

struct LoadDenseE5M2 {  // the upper byte of a float16
  using Stored = uint8_t;
  static V16 load(const uint8_t* p) {
    uint16_t halves[kLanes];
    for (int i = 0; i < kLanes; ++i) halves[i] = static_cast<uint16_t>(p[i] << 8);
    return Simd::load_f16(halves);
  }
};

void dense_widen(DenseElement type, const void* from, int64_t count, float* to) {
  switch (type) {
    case DenseElement::kF32:
      return widen_all<LoadF32>(from, count, to);
    case DenseElement::kF16:
      return widen_all<LoadF16>(from, count, to);
    case DenseElement::kBF16:
      return widen_all<LoadBF16>(from, count, to);
    case DenseElement::kE4M3:
      return widen_all<LoadDenseE4M3>(from, count, to);
    case DenseElement::kE5M2:
      return widen_all<LoadDenseE5M2>(from, count, to);
    case DenseElement::kI8: {
      const auto* codes = static_cast<const int8_t*>(from);
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(codes[i]);
      return;
    }
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
