// Softmax of eight query rows side by side, with AVX-512: one after the other, each row would wait for its
// own row_max.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/simd/avx512.h"
#include "kernels/cpu/simd/exp.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

constexpr int32_t kSetRows = 8;  // rows that go together

// exp16_below, of NaN too.
template <class Exp = FullExp>
[[gnu::always_inline]] inline V16 exp_below(V16 x) {
  const V16 low = Simd::broadcast(-86.0f);
  const auto [p, shifted] = Exp::parts(_mm512_max_ps(low, x));  // the second one, where one is a NaN
  const __mmask16 some = _mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(some, _mm512_castps_si512(p),
                                                    _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

// Lane r of the result: the lanes of x[r], folded by `two`, which takes two registers.
template <class Two>
[[gnu::always_inline]] inline V16 fold_eight(V16 (&x)[kSetRows], Two two) {
  unroll<4>([&](auto i) {  // halves: rows i, i + 4
    x[i] = two(_mm512_shuffle_f32x4(x[i], x[i + 4], 0x44), _mm512_shuffle_f32x4(x[i], x[i + 4], 0xee));
  });
  unroll<2>([&](auto i) {  // quarters: rows i, i + 4, i + 2, i + 6
    x[i] = two(_mm512_shuffle_f32x4(x[i], x[i + 2], 0x88), _mm512_shuffle_f32x4(x[i], x[i + 2], 0xdd));
  });
  V16 all = two(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  all = two(all, _mm512_permute_ps(all, 0x4e));
  return _mm512_permutexvar_ps(_mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 13, 12, 5, 4, 9, 8, 1, 0), all);
}
[[gnu::always_inline]] inline V16 max_of_eight(V16 (&x)[kSetRows]) {
  return fold_eight(
      x, [](V16 a, V16 b) __attribute__((always_inline)) { return _mm512_max_ps(a, b); });
}
[[gnu::always_inline]] inline V16 min_of_eight(V16 (&x)[kSetRows]) {
  return fold_eight(
      x, [](V16 a, V16 b) __attribute__((always_inline)) { return _mm512_min_ps(a, b); });
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
