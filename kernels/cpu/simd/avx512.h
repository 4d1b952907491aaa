// The vector type with AVX-512: sixteen floats are one register. The matrix products of block-quantized
// weights do not go through it (matmul/formats_x86.h).
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/simd/target.h"
#if !defined(MILLRACE_SIMD_AVX512)
#error "define MILLRACE_TARGET_AVX512 (or _VNNI, _BW) before the first include"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

struct Simd {
  using V16 = __m512;
  // 24 registers of sums, 4 of weights, 1 of activations.
  static constexpr int kFloatTileRows = 4, kFloatTileM = 6;
  // Query rows that share loads in attention, and blocks taken at once.
  static constexpr int kAttendRows = 8, kAttendAtOnce = 2;

  static __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

  static V16 broadcast(float x) { return _mm512_set1_ps(x); }
  static V16 zero() { return _mm512_setzero_ps(); }
  static V16 load(const float* p) { return _mm512_loadu_ps(p); }
  static V16 load_f16(const uint16_t* p) { return _mm512_cvtph_ps(load256(p)); }
#if defined(MILLRACE_HAS_AVX512_VBMI)
  static V16 load_bf16(const uint16_t* p) {  // one operation, where a widening and a shift are two
    const __m512i order = _mm512_load_si512(kToUpperHalves);
    return _mm512_castsi512_ps(
        _mm512_maskz_permutexvar_epi8(0xcccccccccccccccc, order, _mm512_castsi256_si512(load256(p))));
  }
  alignas(64) static constexpr uint8_t kToUpperHalves[64] = {
      0,  0,  0,  1,  0,  0,  2,  3,  0,  0,  4,  5,  0,  0,  6,  7,  0,  0,  8,  9, 0,  0,
      10, 11, 0,  0,  12, 13, 0,  0,  14, 15, 0,  0,  16, 17, 0,  0,  18, 19, 0,  0, 20, 21,
      0,  0,  22, 23, 0,  0,  24, 25, 0,  0,  26, 27, 0,  0,  28, 29, 0,  0,  30, 31};
#else
  static V16 load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(p)), 16));
  }
#endif
  // As a float16 with its exponent's bias eight too low: those below the smallest power of two cost nothing
  // so.
  static V16 widen_e4m3(const uint8_t* p) {
    const __m128i x = load128(p);
    const __m256i words = _mm256_cvtepu8_epi16(x);
    const __m256i halves =
        _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x7f)), 7),
                        _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x80)), 8));
    const V16 value = _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0f));
    const __mmask16 nan = _mm_cmpeq_epi8_mask(_mm_and_si128(x, _mm_set1_epi8(0x7f)), _mm_set1_epi8(0x7f));
    return _mm512_castsi512_ps(_mm512_mask_or_epi32(
        _mm512_castps_si512(value), nan, _mm512_castps_si512(value), _mm512_set1_epi32(0x7fc00000)));
  }
  static void store(float* p, V16 x) { _mm512_storeu_ps(p, x); }
  // Rounded to nearest even; a NaN stays one.
  static void store_f16(uint16_t* p, V16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void store_bf16(uint16_t* p, V16 x) {
    const __m512i u = _mm512_castps_si512(x);
    const __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
    const __m512i rounded = _mm512_mask_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd, u,
                                                  _mm512_set1_epi32(0x8000));
    const __m512i bits =
        _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), u, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), upper_halves(bits));
  }
#if defined(MILLRACE_HAS_AVX512_VBMI)
  static __m256i upper_halves(__m512i x) {  // one operation, where a shift and a narrowing are three
    const __m512i order = _mm512_load_si512(kUpperHalves);
    return _mm512_castsi512_si256(_mm512_permutexvar_epi8(order, x));
  }
  alignas(64) static constexpr uint8_t kUpperHalves[64] = {2,  3,  6,  7,  10, 11, 14, 15, 18, 19, 22,
                                                           23, 26, 27, 30, 31, 34, 35, 38, 39, 42, 43,
                                                           46, 47, 50, 51, 54, 55, 58, 59, 62, 63};
#else
  static __m256i upper_halves(__m512i x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)); }
#endif
  static V16 add(V16 x, V16 y) { return _mm512_add_ps(x, y); }
  static V16 sub(V16 x, V16 y) { return _mm512_sub_ps(x, y); }
  static V16 mul(V16 x, V16 y) { return _mm512_mul_ps(x, y); }
  static V16 div(V16 x, V16 y) { return _mm512_div_ps(x, y); }
  // maxps and minps give their second operand when either is NaN; a NaN must survive, so a first one is put
  // back.
  static V16 keep_nan(V16 result, V16 x) {
    return _mm512_mask_mov_ps(result, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
  }
  static V16 max(V16 x, V16 y) { return keep_nan(_mm512_max_ps(x, y), x); }
  static V16 min(V16 x, V16 y) { return keep_nan(_mm512_min_ps(x, y), x); }
  // The same where y is a bound, not zero and no NaN.
  static V16 at_least(V16 x, V16 y) { return _mm512_max_ps(y, x); }
  static V16 at_most(V16 x, V16 y) { return _mm512_min_ps(y, x); }
  // The larger one; of a NaN any.
  static V16 larger(V16 x, V16 y) { return _mm512_max_ps(x, y); }
  // The larger of x, which is not negative, and |y|; a NaN survives: as an integer it is above infinity.
  static V16 larger_size(V16 x, V16 y) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(x), _mm512_castps_si512(abs(y))));
  }
  static V16 abs(V16 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
  }
  static V16 fma(V16 x, V16 y, V16 z) { return _mm512_fmadd_ps(x, y, z); }
  // a < b ? x : y
  static V16 select_less(V16 a, V16 b, V16 x, V16 y) {
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);
  }
  // a < b ? 0 : y
  static V16 zero_if_less(V16 a, V16 b, V16 y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), y);
  }
  // a * 2^n where the low bits of `magic` hold n: adds them to a's exponent.
  static V16 add_exponent(V16 a, V16 magic) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_castps_si512(magic), 23)));
  }
  // a < b ? 0 : y * 2^n
  static V16 zero_if_less(V16 a, V16 b, V16 y, V16 magic) {
    return _mm512_castsi512_ps(_mm512_maskz_add_epi32(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ),
                                                      _mm512_castps_si512(y),
                                                      _mm512_slli_epi32(_mm512_castps_si512(magic), 23)));
  }
  static __m256 low(V16 x) { return _mm512_castps512_ps256(x); }
  static __m256 high(V16 x) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)); }
  static float reduce_sum(V16 x) {
    const __m256 eight = _mm256_add_ps(low(x), high(x));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static float reduce_max(V16 x) {
    V16 lanes = max(x, _mm512_shuffle_f32x4(x, x, 0x4e));          // lanes j and j + 8
    lanes = max(lanes, _mm512_shuffle_f32x4(lanes, lanes, 0xb1));  // j and j + 4
    lanes = max(lanes, _mm512_permute_ps(lanes, 0x4e));            // j and j + 2
    lanes = max(lanes, _mm512_permute_ps(lanes, 0xb1));            // 0 and 1
    return _mm512_cvtss_f32(lanes);
  }
  // 16 floats of magnitude at most 127 to int8, to nearest even; returns their sum.
  static int32_t round_to_int8(V16 x, int8_t* out) {
    const __m512i v = _mm512_cvtps_epi32(x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtsepi32_epi8(v));
    return _mm512_reduce_add_epi32(v);
  }

  // The low byte of each float's bits.
  static void store_low_bytes(V16 x, int8_t* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), low_bytes(_mm512_castps_si512(x)));
  }
#if defined(MILLRACE_HAS_AVX512_VBMI)
  static __m128i low_bytes(__m512i x) {  // one operation, where a narrowing is two
    const __m512i order = _mm512_castsi128_si512(_mm_load_si128(reinterpret_cast<const __m128i*>(kLowBytes)));
    return _mm512_castsi512_si128(_mm512_permutexvar_epi8(order, x));
  }
  alignas(16) static constexpr uint8_t kLowBytes[16] = {0,  4,  8,  12, 16, 20, 24, 28,
                                                        32, 36, 40, 44, 48, 52, 56, 60};
#else
  static __m128i low_bytes(__m512i x) { return _mm512_cvtepi32_epi8(x); }
#endif

  // ---- 16 sums of products of int8, four at a time: `to` += of lane j the codes 4 j .. 4 j + 3 times `by`
  using I16 = __m512i;
  using Codes = __m512i;
#if defined(MILLRACE_HAS_AVX512_VNNI)
  using Keys = __m512i;  // plus 128, for one factor must not be negative; sums begin with what that adds
  static I16 begin_keys(int32_t sum_of_factors) { return _mm512_set1_epi32(-128 * sum_of_factors); }
  static Keys load_keys(const uint8_t* p) { return _mm512_xor_si512(load_codes(p), _mm512_set1_epi8(-128)); }
  static I16 dot_keys(I16 to, Keys keys, const int8_t* by) {
    return _mm512_dpbusd_epi32(to, keys, broadcast4(by));
  }
  static I16 dot_not_negative(I16 to, Codes codes, const int8_t* by) {
    return _mm512_dpbusd_epi32(to, broadcast4(by), codes);
  }
#else
  // vpmaddubsw adds two products in 16 bits: 2 * 128 * 127 is the most that fits, so a sign goes to the
  // factor.
  struct Keys {
    __m512i magnitude;
    __mmask64 negative;
  };
  static I16 begin_keys(int32_t) { return _mm512_setzero_si512(); }
  static Keys load_keys(const uint8_t* p) {
    const __m512i codes = load_codes(p);
    return {_mm512_abs_epi8(codes), _mm512_movepi8_mask(codes)};
  }
  static I16 dot_keys(I16 to, Keys keys, const int8_t* by) {
    return dot_pairs(to, keys.magnitude, negate(broadcast4(by), keys.negative));
  }
  static I16 dot_not_negative(I16 to, Codes codes, const int8_t* by) {
    return dot_pairs(to, broadcast4(by), codes);
  }
  static __m512i negate(__m512i x, __mmask64 where) {
    return _mm512_mask_sub_epi8(x, where, _mm512_setzero_si512(), x);
  }
  static I16 dot_pairs(I16 to, __m512i not_negative, __m512i x) {
    return _mm512_add_epi32(to,
                            _mm512_madd_epi16(_mm512_maddubs_epi16(not_negative, x), _mm512_set1_epi16(1)));
  }
#endif
  static I16 zero_sums() { return _mm512_setzero_si512(); }
  static Codes load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static V16 to_float(I16 x) { return _mm512_cvtepi32_ps(x); }
  static __m512i broadcast4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
  }
};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
