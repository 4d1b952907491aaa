// The products of attention over tensors. Lanes are query rows (or keys, in the pass over keys), and the
// other operand is read where it lies, a number at a time, and broadcast: nothing is transposed in the inner
// loop.
//
//     by_rows:    C[m][lanes]  = sum_k A[m][k] B[k][lanes]   scores: A keys [m][dim], B queries [dim][lanes]
//     by_columns: C[m][lanes] += sum_k A[k][m] B[k][lanes]   values: A [key][dim m], B weights [key][lanes]
//
// An output is one chain of fused multiply-adds over k in order, whatever the block it is computed in: the
// same bits for any tile and any instruction set.
#pragma once

#include <stdint.h>

#include "kernels/cpu/attention/flash_task.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// A block of kFlashM outputs by kFlashN vectors. Sums in registers: 16 of 32 (AVX-512: 10 loads for 16
// multiply-adds), 8 of 16 (AVX2: 6 for 8), 16 of 32 (NEON). Dimensions are multiples of 8.
#if defined(MILLRACE_SIMD_AVX512)
inline constexpr int kFlashM = 8, kFlashN = 2;
#else
inline constexpr int kFlashM = 4, kFlashN = 1;
#endif

template <int kN, bool kByRows>
[[gnu::always_inline]] inline void flash_block(const float* a, int64_t a_stride, int64_t depth,
                                               const float* b, float* c) {
  V16 sum[kFlashM][kN];
  unroll<kFlashM>([&](auto m) __attribute__((always_inline)) {
    unroll<kN>([&](auto n) __attribute__((always_inline)) {
      sum[m][n] = kByRows ? Simd::zero() : Simd::load(c + m * kFlashTile + n * kLanes);
    });
  });
  for (int64_t k = 0; k < depth; ++k) {
    V16 lanes[kN];
    unroll<kN>([&](auto n) __attribute__((always_inline)) {
      lanes[n] = Simd::load(b + k * kFlashTile + n * kLanes);
    });
    unroll<kFlashM>([&](auto m) __attribute__((always_inline)) {
      const V16 by = Simd::broadcast(kByRows ? a[m * a_stride + k] : a[k * a_stride + m]);
      unroll<kN>([&](auto n)
                     __attribute__((always_inline)) { sum[m][n] = Simd::fma(by, lanes[n], sum[m][n]); });
    });
  }
  unroll<kFlashM>([&](auto m) __attribute__((always_inline)) {
    unroll<kN>([&](auto n) __attribute__((always_inline)) {
      Simd::store(c + m * kFlashTile + n * kLanes, sum[m][n]);
    });
  });
}

// Rows that are read next, prefetched a share at a time while a product is computed: a tile of strided rows
// comes from memory, or the third-level cache, a line at a time.
struct FlashPrefetch {
  const FlashRows* rows = nullptr;
  int32_t at = 0, last = 0, head = 0;
  int64_t bytes = 0;  // of a row
  static constexpr int32_t kRowsPerBlock = 4;
  [[gnu::always_inline]] void operator()() {
    for (int32_t i = 0; i < kRowsPerBlock && at < last; ++i, ++at) {
      const uint8_t* row = rows->at(at, head);
      for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(row + line);
    }
  }
};

// m: a multiple of kFlashM. lanes: a multiple of 16. B and C have rows of 64 lanes.
template <bool kByRows>
void flash_gemm(const float* a, int64_t a_stride, int64_t m, int64_t depth, const float* b, int64_t lanes,
                float* c, FlashPrefetch next = {}) {
  int64_t lane = 0;
  for (; lane + kFlashN * kLanes <= lanes; lane += kFlashN * kLanes) {
    for (int64_t i = 0; i < m; i += kFlashM) {
      next();
      flash_block<kFlashN, kByRows>(a + (kByRows ? i * a_stride : i), a_stride, depth, b + lane,
                                    c + i * kFlashTile + lane);
    }
  }
  if constexpr (kFlashN > 1) {
    for (; lane < lanes; lane += kLanes) {
      for (int64_t i = 0; i < m; i += kFlashM) {
        next();
        flash_block<1, kByRows>(a + (kByRows ? i * a_stride : i), a_stride, depth, b + lane,
                                c + i * kFlashTile + lane);
      }
    }
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
