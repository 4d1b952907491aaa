// The lanes of the quantizers with AVX2: groups of eight blocks, 0 to 3 in the lower halves of the registers
// and 4 to 7 in the upper ones, so that everything stays within halves. What each operation means is said in
// lanes_scalar.h.
#pragma once

#include "kernels/cpu/simd/avx2.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

struct Lanes : Register {
  using Register::abs, Register::fma;  // besides those of words
  static constexpr int kBlocks = 8;
  using Mask = __m256;
  using Ints = __m256i;
  using Bytes = __m256i;
  struct Words {
    __m256i a, b;
  };

  static V round(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Mask greater(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
  static bool any(Mask m) { return _mm256_movemask_ps(m) != 0; }
  static V select(Mask m, V a, V b) { return _mm256_blendv_ps(b, a, m); }

  static V load_part(const float* x, int stride, int t, int p) {
    const float* at = x + p * stride + 4 * t;
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(at)), _mm_loadu_ps(at + 4 * stride), 1);
  }
  template <int kPart>
  static V spread(V x) {
    return _mm256_permute_ps(x, kPart * 0x55);
  }
  static V add_across(const V* p) {
    return _mm256_hadd_ps(_mm256_hadd_ps(p[0], p[1]), _mm256_hadd_ps(p[2], p[3]));
  }
  static V larger_pairs(V a, V b) {
    return max(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));  // even and odd elements
  }
  static V max_across(const V* p) { return larger_pairs(larger_pairs(p[0], p[1]), larger_pairs(p[2], p[3])); }
  static V smaller_pairs(V a, V b) {
    return min(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
  }
  static V min_across(const V* p) {
    return smaller_pairs(smaller_pairs(p[0], p[1]), smaller_pairs(p[2], p[3]));
  }

  // The lower 16 bits of eight and eight floats.
  static __m256i shorts(V a, V b) {
    const __m256i mask = _mm256_set1_epi32(0xffff);
    return _mm256_packus_epi32(_mm256_and_si256(_mm256_castps_si256(a), mask),
                               _mm256_and_si256(_mm256_castps_si256(b), mask));
  }
  static __m256i pack_low(__m256i a, __m256i b) {
    const __m256i mask = _mm256_set1_epi16(0xff);
    return _mm256_packus_epi16(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask));
  }
  static Words all_words(int x) {
    const __m256i all = _mm256_set1_epi16(static_cast<short>(x));
    return {all, all};
  }
  static Words words(const V* p) { return {shorts(p[0], p[1]), shorts(p[2], p[3])}; }
  static Bytes high_bytes(Words x) {
    return _mm256_packus_epi16(_mm256_srli_epi16(x.a, 8), _mm256_srli_epi16(x.b, 8));
  }
  static Bytes low_bytes(Words x) { return pack_low(x.a, x.b); }
  static void split(Words x, Bytes& high, Bytes& low) {
    high = high_bytes(x);
    low = _mm256_xor_si256(low_bytes(x), all_bytes(-128));
  }
  static Words add_saturated(Words x, Words y) {
    return {_mm256_adds_epi16(x.a, y.a), _mm256_adds_epi16(x.b, y.b)};
  }
  static Words sub_saturated(Words x, Words y) {
    return {_mm256_subs_epi16(x.a, y.a), _mm256_subs_epi16(x.b, y.b)};
  }
  static Words multiplied(Words x, Words by) {
    return {_mm256_mulhrs_epi16(x.a, by.a), _mm256_mulhrs_epi16(x.b, by.b)};
  }
  template <int kShift>
  static Words round_shift(Words x) {
    return multiplied(x, all_words(1 << (15 - kShift)));
  }
  static Words fma(Words x, Words by, Words plus) { return add_saturated(plus, multiplied(x, by)); }
  static Words abs(Words x) { return {_mm256_abs_epi16(x.a), _mm256_abs_epi16(x.b)}; }
  static Bytes all_bytes(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
  static Bytes add_saturated(Bytes a, Bytes b) { return _mm256_adds_epi8(a, b); }
  static Bytes sub_saturated(Bytes a, Bytes b) { return _mm256_subs_epi8(a, b); }
  // There are no shifts of bytes: unsigned ones, 128 more, by 16 bits at a time without what comes from the
  // neighbour. vpavgb rounds as the last of the shifts has to.
  template <int kShift>
  static __m256i shift_unsigned(__m256i x) {
    if constexpr (kShift == 0) return x;
    return _mm256_and_si256(_mm256_srli_epi16(x, kShift),
                            _mm256_set1_epi8(static_cast<char>(0xff >> kShift)));
  }
  template <int kShift>
  static Bytes shift(Bytes x) {
    const __m256i shifted = shift_unsigned<kShift>(_mm256_xor_si256(x, all_bytes(-128)));
    return _mm256_sub_epi8(shifted, all_bytes(128 >> kShift));
  }
  template <int kShift>
  static Bytes round_shift(Bytes x) {
    const __m256i shifted = shift_unsigned<kShift - 1>(_mm256_xor_si256(x, all_bytes(-128)));
    return _mm256_sub_epi8(_mm256_avg_epu8(shifted, _mm256_setzero_si256()), all_bytes(128 >> kShift));
  }
  static Ints zero_ints() { return _mm256_setzero_si256(); }
  static Ints add_pairs(Ints sum, __m256i pairs) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static Ints dot_signed(Ints sum, Bytes a, Bytes b) {
    return add_pairs(sum, _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a)));
  }
  static Ints add_squares(Ints sum, Bytes a) {
    return add_misses(sum, _mm256_abs_epi8(a), _mm256_setzero_si256());
  }
  static Ints sum_signed(Ints sum, Bytes a) { return add_pairs(sum, _mm256_maddubs_epi16(all_bytes(1), a)); }
  static V to_float(Ints x) { return _mm256_cvtepi32_ps(x); }
  static V to_float(Ints high, Ints low) {
    return _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(high, 8), low));
  }

  static Ints add_misses(Ints sum, Bytes x, Bytes level) {
    const __m256i off = _mm256_or_si256(_mm256_subs_epu8(x, level), _mm256_subs_epu8(level, x));
    // The misses do not fit signed bytes: pairs of 16 bits, two sums of pairs per block.
    const __m256i zero = _mm256_setzero_si256(), low = _mm256_unpacklo_epi8(off, zero),
                  high = _mm256_unpackhi_epi8(off, zero);
    return _mm256_add_epi32(sum,
                            _mm256_hadd_epi32(_mm256_madd_epi16(low, low), _mm256_madd_epi16(high, high)));
  }
  template <int kShift>
  static Bytes look_up(const uint8_t* table, Bytes x) {
    const auto half = [&](int at) {
      return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table + at)));
    };
    const __m256i index = shift_unsigned<kShift>(x);
    // Bit 4 of the index, as the sign that vpblendvb looks at.
    return _mm256_blendv_epi8(_mm256_shuffle_epi8(half(0), index), _mm256_shuffle_epi8(half(16), index),
                              _mm256_slli_epi16(index, 3));
  }
  static Bytes nibbles(Bytes low, Bytes high) { return _mm256_or_si256(low, _mm256_slli_epi16(high, 4)); }
  static Bytes and_bytes(Bytes x, int mask) { return _mm256_and_si256(x, all_bytes(mask)); }
  static Bytes or_bytes(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
  static Bytes min_bytes(Bytes a, Bytes b) { return _mm256_min_epu8(a, b); }
  static Bytes shift_down(Bytes x, Bytes by) {
    const __m256i one = _mm256_cmpeq_epi8(by, all_bytes(1)), three = _mm256_cmpeq_epi8(by, all_bytes(3));
    return _mm256_blendv_epi8(_mm256_blendv_epi8(shift_unsigned<2>(x), shift_unsigned<1>(x), one),
                              shift_unsigned<3>(x), three);
  }
  static Ints dot_small(Ints sum, Bytes a, Bytes b) { return add_pairs(sum, _mm256_maddubs_epi16(a, b)); }
  static Bytes with_signs(Bytes codes, Bytes signs) {
    return _mm256_or_si256(codes, _mm256_srli_epi16(_mm256_and_si256(signs, all_bytes(-128)), 4));
  }
  static V power_of(V x) { return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000))); }

  static void store_codes(const Bytes* quads, uint8_t* out, int stride) {
    const __m256i a = _mm256_unpacklo_epi32(quads[0], quads[1]),
                  b = _mm256_unpackhi_epi32(quads[0], quads[1]),
                  c = _mm256_unpacklo_epi32(quads[2], quads[3]),
                  d = _mm256_unpackhi_epi32(quads[2], quads[3]);
    const auto put = [&](int block, __m256i both) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + block * stride), _mm256_castsi256_si128(both));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (block + 4) * stride),
                       _mm256_extracti128_si256(both, 1));
    };
    put(0, _mm256_unpacklo_epi64(a, c));
    put(1, _mm256_unpackhi_epi64(a, c));
    put(2, _mm256_unpacklo_epi64(b, d));
    put(3, _mm256_unpackhi_epi64(b, d));
  }

  static void store_halves(uint16_t* out, V x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
