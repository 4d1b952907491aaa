// Products of plain matrices of int8 on a CPU with dot products of four bytes (dense_task.h): sixteen columns
// a vector, four codes of a row of A broadcast. For tables whose dot products take any two bytes: AVX-512
// with VNNI, NEON's; AVX2's cannot negate -128.
#pragma once

#include <stdint.h>

#include "kernels/cpu/matmul/dense_task.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

#if defined(MILLRACE_SIMD_AVX512)
inline constexpr int kDotsM = 6, kDotsN = 4;  // 24 registers of sums, 4 of codes
inline void add_sums(int32_t* to, Simd::I16 x) {
  _mm512_storeu_si512(to, _mm512_add_epi32(_mm512_loadu_si512(to), x));
}
#else
inline constexpr int kDotsM = 4, kDotsN = 1;  // NEON: 16 registers of sums, 4 of codes
inline void add_sums(int32_t* to, Simd::I16 x) {
  int32_t sums[kLanes];
  static_assert(sizeof x == sizeof sums);
  __builtin_memcpy(sums, &x, sizeof sums);
  for (int i = 0; i < kLanes; ++i) to[i] += sums[i];
}
#endif

template <int kM, int kN>
[[gnu::always_inline]] inline void dots_block(const DenseDots& d, int64_t row, int64_t lane) {
  Simd::I16 sum[kM][kN];
  unroll<kM>([&](auto m) { unroll<kN>([&](auto n) { sum[m][n] = Simd::begin_keys(d.a_sums[row + m]); }); });
  const int8_t* a = d.a + row * d.a_stride;
  const uint8_t* b = d.b + 4 * lane;
  for (int64_t k = 0; k < d.depth; k += 4, b += 4 * kDenseLanes) {
    Simd::Keys keys[kN];
    unroll<kN>([&](auto n) __attribute__((always_inline)) { keys[n] = Simd::load_keys(b + 4 * kLanes * n); });
    unroll<kM>([&](auto m) __attribute__((always_inline)) {
      unroll<kN>([&](auto n) __attribute__((always_inline)) {
        sum[m][n] = Simd::dot_keys(sum[m][n], keys[n], a + m * d.a_stride + k);
      });
    });
  }
  int32_t* to = d.sums + row * kDenseLanes + lane;
  unroll<kM>(
      [&](auto m) { unroll<kN>([&](auto n) { add_sums(to + m * kDenseLanes + n * kLanes, sum[m][n]); }); });
}

void dense_dots(const DenseDots& d) {
  for (int64_t lane = 0; lane < kDenseLanes; lane += kDotsN * kLanes) {
    int64_t row = 0;
    for (; row + kDotsM <= d.rows; row += kDotsM) dots_block<kDotsM, kDotsN>(d, row, lane);
    for (; row < d.rows; ++row) dots_block<1, kDotsN>(d, row, lane);
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
