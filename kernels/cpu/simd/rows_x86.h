// Vectors with a lane for each of kRows rows of weights: sixteen with AVX-512, eight with AVX2. The products
// of block-quantized weights (matmul/formats_x86.h and what is built on it) are written against these.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/simd/simd.h"
#if !defined(MILLRACE_SIMD_X86)
#error "for targets of x86"
#endif

namespace millrace::cpu::MILLRACE_TARGET::lane {
namespace {

inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

#if defined(MILLRACE_SIMD_AVX512)

constexpr int kRows = 16;
using V = __m512i;  // a dword a row
using F = __m512;

inline V load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(void* p, V x) { _mm512_storeu_si512(p, x); }
inline V repeat128(__m128i x) { return _mm512_broadcast_i32x4(x); }
inline V zero() { return _mm512_setzero_si512(); }
inline V bytes_of(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
inline V words_of(int x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); }
inline V dwords_of(int32_t x) { return _mm512_set1_epi32(x); }
inline V bit_and(V a, V b) { return _mm512_and_si512(a, b); }
inline V bit_or(V a, V b) { return _mm512_or_si512(a, b); }
inline V bit_xor(V a, V b) { return _mm512_xor_si512(a, b); }
// a | (b & c): 0xf8 is its truth table.
inline V or_and(V a, V b, V c) { return _mm512_ternarylogic_epi32(a, b, c, 0xf8); }
inline V add8(V a, V b) { return _mm512_add_epi8(a, b); }
inline V add16(V a, V b) { return _mm512_add_epi16(a, b); }
inline V add32(V a, V b) { return _mm512_add_epi32(a, b); }
inline V sub8(V a, V b) { return _mm512_sub_epi8(a, b); }
inline V sub32(V a, V b) { return _mm512_sub_epi32(a, b); }
inline V mul16(V a, V b) { return _mm512_mullo_epi16(a, b); }
inline V mul32(V a, V b) { return _mm512_mullo_epi32(a, b); }
inline V max_u32(V a, V b) { return _mm512_max_epu32(a, b); }
[[gnu::always_inline]] inline V shift_left16(V x, unsigned n) { return _mm512_slli_epi16(x, n); }
[[gnu::always_inline]] inline V shift_left32(V x, unsigned n) { return _mm512_slli_epi32(x, n); }
[[gnu::always_inline]] inline V shift_right16(V x, unsigned n) { return _mm512_srli_epi16(x, n); }
[[gnu::always_inline]] inline V shift_right32(V x, unsigned n) { return _mm512_srli_epi32(x, n); }
[[gnu::always_inline]] inline V signed_right16(V x, unsigned n) { return _mm512_srai_epi16(x, n); }
[[gnu::always_inline]] inline V signed_right32(V x, unsigned n) { return _mm512_srai_epi32(x, n); }
// Of each 128 bits apart.
inline V shuffle(V x, V places) { return _mm512_shuffle_epi8(x, places); }
inline V low_dwords(V a, V b) { return _mm512_unpacklo_epi32(a, b); }
inline V high_dwords(V a, V b) { return _mm512_unpackhi_epi32(a, b); }
inline V low_qwords(V a, V b) { return _mm512_unpacklo_epi64(a, b); }
inline V high_qwords(V a, V b) { return _mm512_unpackhi_epi64(a, b); }
// Sixteen where the byte has a bit of `bits`, added to u.
inline V add_bit4(V u, V bytes, V bits) {
  return _mm512_mask_add_epi8(u, _mm512_test_epi8_mask(bytes, bits), u, bytes_of(16));
}
inline V multiply_pairs(V not_negative, V x) { return _mm512_maddubs_epi16(not_negative, x); }
inline V multiply_words(V a, V b) { return _mm512_madd_epi16(a, b); }  // and add two to a dword
inline V sum_pairs(V words) { return multiply_words(words, words_of(1)); }
#if defined(MILLRACE_HAS_AVX512_VNNI)
#define MILLRACE_ROWS_DOT
inline V dot(V to, V not_negative, V x) { return _mm512_dpbusd_epi32(to, not_negative, x); }
#endif
// What multiplies by a signed code: its magnitude, and where it is negative.
struct Sign {
  __mmask64 negative;
};
inline Sign sign_of(V x) { return {_mm512_movepi8_mask(x)}; }
inline V magnitude(V x) { return _mm512_abs_epi8(x); }
inline V with_sign(V x, Sign sign) { return _mm512_mask_sub_epi8(x, sign.negative, zero(), x); }

inline F as_floats(V x) { return _mm512_castsi512_ps(x); }
inline V as_dwords(F x) { return _mm512_castps_si512(x); }
inline F to_floats(V x) { return _mm512_cvtepi32_ps(x); }
inline F zero_floats() { return _mm512_setzero_ps(); }
inline F all(float x) { return _mm512_set1_ps(x); }
inline F load_floats(const float* p) { return _mm512_loadu_ps(p); }
inline F load_halves(const uint16_t* p) { return Simd::load_f16(p); }
inline F floats_of_low_halves(V x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }
inline V widen_words(const uint16_t* p) { return _mm512_cvtepu16_epi32(Simd::load256(p)); }
inline V widen_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(load128(p)); }
inline void store_floats(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F multiply(F a, F b) { return _mm512_mul_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : (1 << count) - 1);
}
// The first `count` rows.
inline void store_rows(float* p, F x, int64_t count) { _mm512_mask_storeu_ps(p, first_lanes(count), x); }
// Rows [begin, end), row r to p[r]; p may lie before what is written.
inline void store_lanes(float* p, F x, int64_t begin, int64_t end) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>(first_lanes(end) & ~first_lanes(begin)), x);
}

#else

constexpr int kRows = 8;
using V = __m256i;
using F = __m256;

inline V load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const V*>(p)); }
inline void store_bytes(void* p, V x) { _mm256_storeu_si256(static_cast<V*>(p), x); }
inline V repeat128(__m128i x) { return _mm256_broadcastsi128_si256(x); }
inline V zero() { return _mm256_setzero_si256(); }
inline V bytes_of(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
inline V words_of(int x) { return _mm256_set1_epi16(static_cast<int16_t>(x)); }
inline V dwords_of(int32_t x) { return _mm256_set1_epi32(x); }
inline V bit_and(V a, V b) { return _mm256_and_si256(a, b); }
inline V bit_or(V a, V b) { return _mm256_or_si256(a, b); }
inline V bit_xor(V a, V b) { return _mm256_xor_si256(a, b); }
inline V or_and(V a, V b, V c) { return bit_or(a, bit_and(b, c)); }
inline V add8(V a, V b) { return _mm256_add_epi8(a, b); }
inline V add16(V a, V b) { return _mm256_add_epi16(a, b); }
inline V add32(V a, V b) { return _mm256_add_epi32(a, b); }
inline V sub8(V a, V b) { return _mm256_sub_epi8(a, b); }
inline V sub32(V a, V b) { return _mm256_sub_epi32(a, b); }
inline V mul16(V a, V b) { return _mm256_mullo_epi16(a, b); }
inline V mul32(V a, V b) { return _mm256_mullo_epi32(a, b); }
inline V max_u32(V a, V b) { return _mm256_max_epu32(a, b); }
[[gnu::always_inline]] inline V shift_left16(V x, int n) { return _mm256_slli_epi16(x, n); }
[[gnu::always_inline]] inline V shift_left32(V x, int n) { return _mm256_slli_epi32(x, n); }
[[gnu::always_inline]] inline V shift_right16(V x, int n) { return _mm256_srli_epi16(x, n); }
[[gnu::always_inline]] inline V shift_right32(V x, int n) { return _mm256_srli_epi32(x, n); }
[[gnu::always_inline]] inline V signed_right16(V x, int n) { return _mm256_srai_epi16(x, n); }
[[gnu::always_inline]] inline V signed_right32(V x, int n) { return _mm256_srai_epi32(x, n); }
inline V shuffle(V x, V places) { return _mm256_shuffle_epi8(x, places); }
inline V low_dwords(V a, V b) { return _mm256_unpacklo_epi32(a, b); }
inline V high_dwords(V a, V b) { return _mm256_unpackhi_epi32(a, b); }
inline V low_qwords(V a, V b) { return _mm256_unpacklo_epi64(a, b); }
inline V high_qwords(V a, V b) { return _mm256_unpackhi_epi64(a, b); }
inline V add_bit4(V u, V bytes, V bits) {
  return or_and(u, _mm256_cmpeq_epi8(bit_and(bytes, bits), bits), bytes_of(16));
}
inline V multiply_pairs(V not_negative, V x) { return _mm256_maddubs_epi16(not_negative, x); }
inline V multiply_words(V a, V b) { return _mm256_madd_epi16(a, b); }  // and add two to a dword
inline V sum_pairs(V words) { return multiply_words(words, words_of(1)); }
#if defined(MILLRACE_HAS_AVX_VNNI)
#define MILLRACE_ROWS_DOT
inline V dot(V to, V not_negative, V x) { return _mm256_dpbusd_avx_epi32(to, not_negative, x); }
#endif
struct Sign {
  V codes;
};
inline Sign sign_of(V x) { return {x}; }
inline V magnitude(V x) { return _mm256_abs_epi8(x); }
// A code of zero makes zero of x, which it is multiplied with.
inline V with_sign(V x, Sign sign) { return _mm256_sign_epi8(x, sign.codes); }

inline F as_floats(V x) { return _mm256_castsi256_ps(x); }
inline V as_dwords(F x) { return _mm256_castps_si256(x); }
inline F to_floats(V x) { return _mm256_cvtepi32_ps(x); }
inline F zero_floats() { return _mm256_setzero_ps(); }
inline F all(float x) { return _mm256_set1_ps(x); }
inline F load_floats(const float* p) { return _mm256_loadu_ps(p); }
inline F load_halves(const uint16_t* p) { return _mm256_cvtph_ps(load128(p)); }
inline F floats_of_low_halves(V x) {
  const V low = bit_and(x, dwords_of(0xffff));
  const V halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
}
inline V widen_words(const uint16_t* p) { return _mm256_cvtepu16_epi32(load128(p)); }
inline V widen_bytes(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline void store_floats(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F multiply(F a, F b) { return _mm256_mul_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline void store_rows(float* p, F x, int64_t count) {
  const V row = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const V wanted = dwords_of(static_cast<int32_t>(count < kRows ? count : kRows));
  _mm256_maskstore_ps(p, _mm256_cmpgt_epi32(wanted, row), x);
}
inline void store_lanes(float* p, F x, int64_t begin, int64_t end) {
  const V row = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const V before = dwords_of(static_cast<int32_t>(begin)), past = dwords_of(static_cast<int32_t>(end));
  _mm256_maskstore_ps(p, _mm256_andnot_si256(_mm256_cmpgt_epi32(before, row), _mm256_cmpgt_epi32(past, row)),
                      x);
}

#endif

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET::lane
