// Softmax of eight query rows side by side, with AVX-512: one after the other, each row would wait for its
// own largest score. Included by kernels_attention.h.
#pragma once

constexpr int32_t kSetRows = 8;  // rows that go together

// exp16 of numbers that are not above zero, and of NaN.
[[gnu::always_inline]] inline V16 exp_below(V16 x) {
  const V16 low = Simd::broadcast(-86.0f);
  const auto [p, shifted] = exp_parts(_mm512_max_ps(low, x));  // the second one, where one is a NaN
  const __mmask16 some = _mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(some, _mm512_castps_si512(p),
                                                    _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

// Lane r of the result: the largest of most[r].
[[gnu::always_inline]] inline V16 largest_of_eight(V16 (&most)[kSetRows]) {
  unroll<4>([&](auto i) {  // halves: rows i, i + 4
    most[i] = _mm512_max_ps(_mm512_shuffle_f32x4(most[i], most[i + 4], 0x44),
                            _mm512_shuffle_f32x4(most[i], most[i + 4], 0xee));
  });
  unroll<2>([&](auto i) {  // quarters: rows i, i + 4, i + 2, i + 6
    most[i] = _mm512_max_ps(_mm512_shuffle_f32x4(most[i], most[i + 2], 0x88),
                            _mm512_shuffle_f32x4(most[i], most[i + 2], 0xdd));
  });
  V16 all = _mm512_max_ps(_mm512_unpacklo_ps(most[0], most[1]), _mm512_unpackhi_ps(most[0], most[1]));
  all = _mm512_max_ps(all, _mm512_permute_ps(all, 0x4e));
  return _mm512_permutexvar_ps(_mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 13, 12, 5, 4, 9, 8, 1, 0), all);
}
