// The vector types on x86 with AVX2, FMA and F16C: a register of eight floats, and Simd, sixteen lanes in two
// registers. avx_vnni is the same, but multiplies bytes by one instruction.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/simd/target.h"
#include "kernels/quant/blocks.h"
#if !defined(MILLRACE_SIMD_AVX2)
#error "define MILLRACE_TARGET_AVX2 or MILLRACE_TARGET_AVX_VNNI before the first include"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// One register of eight floats. min and max give their second operand where one is a NaN.
struct Register {
  using V = __m256;
  static V all(float x) { return _mm256_set1_ps(x); }
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static V load_halves(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store(float* p, V x) { _mm256_storeu_ps(p, x); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V div(V a, V b) { return _mm256_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V min(V a, V b) { return _mm256_min_ps(a, b); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
  static V abs(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
};

struct Simd {
  using R = Register;
  static constexpr int kFloatTileRows = 2, kFloatTileM = 2;  // sums: eight registers
  // Query rows that share loads in attention, and blocks taken at once.
  static constexpr int kAttendRows = 4, kAttendAtOnce = 1;
  struct V16 {
    __m256 a, b;
  };                  // lanes 0-7, 8-15
  using F4 = __m128;  // one lane per row of a tile
  using I4 = __m128i;
  using I8x32 = __m256i;
  using Partial = __m256i;  // a block's integer sum in eight parts; the first four from its first half

  // ---- 16 floats
  static V16 broadcast(float x) {
    const __m256 v = R::all(x);
    return {v, v};
  }
  static V16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static V16 load(const float* p) { return {R::load(p), R::load(p + 8)}; }
  static V16 load_f16(const uint16_t* p) { return {R::load_halves(p), R::load_halves(p + 8)}; }
  static __m256 widen_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
  }
  static V16 load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
  // As a float16 with its exponent's bias eight too low: those below the smallest power of two cost nothing
  // so.
  static __m256 e4m3_from_words(__m128i words) {
    const __m128i seven = _mm_set1_epi16(0x7f), magnitude = _mm_and_si128(words, seven);
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(words, _mm_set1_epi16(0x80)), 8);
    const __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(_mm_slli_epi16(magnitude, 7), sign)),
                                       _mm256_set1_ps(256.0f));
    const __m256i nan = _mm256_and_si256(_mm256_cvtepi16_epi32(_mm_cmpeq_epi16(magnitude, seven)),
                                         _mm256_set1_epi32(0x7fc00000));
    return _mm256_or_ps(value, _mm256_castsi256_ps(nan));
  }
  static V16 widen_e4m3(const uint8_t* p) {
    const __m256i words = _mm256_cvtepu8_epi16(load128(p));
    return {e4m3_from_words(_mm256_castsi256_si128(words)),
            e4m3_from_words(_mm256_extracti128_si256(words, 1))};
  }
  static void store(float* p, V16 x) {
    R::store(p, x.a);
    R::store(p + 8, x.b);
  }
  // Rounded to nearest even; a NaN stays one.
  static void store_f16(uint16_t* p, V16 x) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, kNearest));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, kNearest));
  }
  static __m256i bf16_bits(__m256 x) {  // in the low half of each lane
    const __m256i u = _mm256_castps_si256(x), upper = _mm256_srli_epi32(u, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  }
  static void store_pairs(uint16_t* p, __m256i a, __m256i b) {  // packed: lanes 0-3 8-11 4-7 12-15
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8));
  }
  [[gnu::noinline]] static void store_bf16_of_any(uint16_t* p, __m256 a, __m256 b) {
    store_pairs(p, bf16_bits(a), bf16_bits(b));
  }
  static __m256i bf16_bits_of_numbers(__m256 x) {
    const __m256i u = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  }
  [[gnu::always_inline]] static void store_bf16(uint16_t* p, V16 x) {
    const __m256 nan = _mm256_cmp_ps(x.a, x.b, _CMP_UNORD_Q);  // in either of two lanes
    if (__builtin_expect(_mm256_movemask_ps(nan), 0) != 0) return store_bf16_of_any(p, x.a, x.b);
    store_pairs(p, bf16_bits_of_numbers(x.a), bf16_bits_of_numbers(x.b));
  }
  static V16 add(V16 x, V16 y) { return {R::add(x.a, y.a), R::add(x.b, y.b)}; }
  static V16 sub(V16 x, V16 y) { return {R::sub(x.a, y.a), R::sub(x.b, y.b)}; }
  static V16 mul(V16 x, V16 y) { return {R::mul(x.a, y.a), R::mul(x.b, y.b)}; }
  static V16 div(V16 x, V16 y) { return {R::div(x.a, y.a), R::div(x.b, y.b)}; }
  // maxps and minps give their second operand when either is NaN; a NaN must survive, so a first one is put
  // back.
  static __m256 keep_nan(__m256 result, __m256 x) {
    return _mm256_blendv_ps(result, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
  static V16 max(V16 x, V16 y) { return {keep_nan(R::max(x.a, y.a), x.a), keep_nan(R::max(x.b, y.b), x.b)}; }
  static V16 min(V16 x, V16 y) { return {keep_nan(R::min(x.a, y.a), x.a), keep_nan(R::min(x.b, y.b), x.b)}; }
  // The same where y is a bound, not zero and no NaN.
  static V16 at_least(V16 x, V16 y) { return {R::max(y.a, x.a), R::max(y.b, x.b)}; }
  static V16 at_most(V16 x, V16 y) { return {R::min(y.a, x.a), R::min(y.b, x.b)}; }
  // The larger one; of a NaN any.
  static V16 larger(V16 x, V16 y) { return {R::max(x.a, y.a), R::max(x.b, y.b)}; }
  // The larger of x, which is not negative, and |y|; a NaN survives: as an integer it is above infinity.
  static __m256 larger_bits(__m256 x, __m256 y) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(x), _mm256_castps_si256(y)));
  }
  static V16 larger_size(V16 x, V16 y) {
    return {larger_bits(x.a, R::abs(y.a)), larger_bits(x.b, R::abs(y.b))};
  }
  static V16 abs(V16 x) { return {R::abs(x.a), R::abs(x.b)}; }
  static V16 fma(V16 x, V16 y, V16 z) { return {R::fma(x.a, y.a, z.a), R::fma(x.b, y.b, z.b)}; }
  // a < b ? x : y
  static V16 select_less(V16 a, V16 b, V16 x, V16 y) {
    return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
  }
  // a < b ? 0 : y
  static V16 zero_if_less(V16 a, V16 b, V16 y) {
    return {_mm256_andnot_ps(_mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ), y.a),
            _mm256_andnot_ps(_mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ), y.b)};
  }
  static __m256 add_exponent(__m256 a, __m256 magic) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(magic), 23)));
  }
  // a * 2^n where the low bits of `magic` hold n: adds them to a's exponent.
  static V16 add_exponent(V16 a, V16 m) { return {add_exponent(a.a, m.a), add_exponent(a.b, m.b)}; }
  static float reduce_sum(V16 x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static float reduce_max(V16 x) {
    const __m256 eight = keep_nan(_mm256_max_ps(x.a, x.b), x.a);
    const __m256 four = _mm256_permute2f128_ps(eight, eight, 1);  // the halves exchanged
    const __m256 m4 = keep_nan(_mm256_max_ps(eight, four), eight);
    const __m256 two = _mm256_permute_ps(m4, 0x4e);  // lanes 2 3 0 1
    const __m256 m2 = keep_nan(_mm256_max_ps(m4, two), m4);
    const __m256 one = _mm256_permute_ps(m2, 0xb1);  // lanes 1 0 3 2
    return _mm256_cvtss_f32(keep_nan(_mm256_max_ps(m2, one), m2));
  }
  // 16 floats of magnitude at most 127 to int8, to nearest even; returns their sum.
  static int32_t round_to_int8(V16 x, int8_t* out) {
    const __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
    const __m128i a16 = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i b16 = _mm_packs_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(a16, b16));
    const __m128i pairs = _mm_madd_epi16(_mm_add_epi16(a16, b16), _mm_set1_epi16(1));
    const __m128i two = _mm_add_epi32(pairs, _mm_unpackhi_epi64(pairs, pairs));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
  }

  // The low byte of each float's bits.
  static void store_low_bytes(V16 x, int8_t* out) {
    const __m256i low = _mm256_set1_epi32(0xff);
    const __m256i a = _mm256_and_si256(_mm256_castps_si256(x.a), low),
                  b = _mm256_and_si256(_mm256_castps_si256(x.b), low);
    const __m128i a16 = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i b16 = _mm_packs_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(a16, b16));
  }

  // ---- 16 sums of products of int8, four at a time: `to` += of lane j the codes 4 j .. 4 j + 3 times `by`
  struct I16 {
    __m256i a, b;
  };
  using Codes = I16;
  using Keys = I16;
  static I16 begin_keys(int32_t) { return zero_sums(); }
  static Keys load_keys(const uint8_t* p) { return load_codes(p); }
  static I16 dot_keys(I16 to, Keys keys, const int8_t* by) {  // |key| * (factor with its sign)
    const __m256i x = broadcast4(by);
    return {multiply_add(to.a, _mm256_abs_epi8(keys.a), _mm256_sign_epi8(x, keys.a)),
            multiply_add(to.b, _mm256_abs_epi8(keys.b), _mm256_sign_epi8(x, keys.b))};
  }
  static I16 zero_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Codes load_codes(const uint8_t* p) { return {load256(p), load256(p + 32)}; }
  static I16 dot_not_negative(I16 to, Codes codes, const int8_t* by) {
    const __m256i x = broadcast4(by);
    return {multiply_add(to.a, x, codes.a), multiply_add(to.b, x, codes.b)};
  }
  static V16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  static __m256i broadcast4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
  }

  // ---- one lane per row
  static F4 zero4() { return _mm_setzero_ps(); }
  static F4 set4(const float* p) { return _mm_loadu_ps(p); }
  static void store4(float* p, F4 a) { _mm_storeu_ps(p, a); }
  static F4 halves4(const uint8_t* const* p, int offset) {
    uint16_t h[4];
    for (int j = 0; j < 4; ++j) __builtin_memcpy(&h[j], p[j] + offset, 2);
    __m128i v = _mm_cvtsi32_si128(h[0]);
    v = _mm_insert_epi16(v, h[1], 1);
    v = _mm_insert_epi16(v, h[2], 2);
    v = _mm_insert_epi16(v, h[3], 3);
    return _mm_cvtph_ps(v);
  }
  // 2^(e - 127) of four e8m0 bytes; 0 is 2^-127, a subnormal. 255, a NaN, becomes infinity.
  static F4 e8m0_4(const uint8_t* const* p) {
    const uint32_t four = static_cast<uint32_t>(*p[0]) | static_cast<uint32_t>(*p[1]) << 8 |
                          static_cast<uint32_t>(*p[2]) << 16 | static_cast<uint32_t>(*p[3]) << 24;
    const __m128i e = _mm_cvtepu8_epi32(_mm_cvtsi32_si128(static_cast<int>(four)));
    return _mm_castsi128_ps(_mm_max_epu32(_mm_slli_epi32(e, 23), _mm_set1_epi32(0x00400000)));
  }
  // d and m = -z d of four Q4_Z blocks: exact, for d has five bits and z seven.
  static void zero_points4(const uint8_t* const* p, F4& d, F4& m) {
    uint16_t dz[4];
    for (int j = 0; j < 4; ++j) __builtin_memcpy(&dz[j], p[j], 2);
    const __m128i words = _mm_setr_epi32(dz[0], dz[1], dz[2], dz[3]);
    const __m128i bits = _mm_add_epi32(_mm_slli_epi32(_mm_srli_epi32(words, 7), 19),
                                       _mm_set1_epi32(static_cast<int>(quant::kQ4ZScaleBias)));
    d = _mm_castsi128_ps(bits);
    const F4 eighths = _mm_cvtepi32_ps(_mm_and_si128(words, _mm_set1_epi32(127)));
    m = _mm_mul_ps(d, _mm_mul_ps(eighths, _mm_set1_ps(-0.125f)));
  }
  static F4 mul4(F4 a, float b) { return _mm_mul_ps(a, _mm_set1_ps(b)); }
  static F4 mul4(F4 a, F4 b) { return _mm_mul_ps(a, b); }
  static F4 fma4(F4 a, F4 b, F4 c) { return _mm_fmadd_ps(a, b, c); }
  static F4 fma4(F4 a, float b, F4 c) { return _mm_fmadd_ps(a, _mm_set1_ps(b), c); }
  static F4 to_float4(I4 a) { return _mm_cvtepi32_ps(a); }
  static I4 sub4(I4 a, int32_t b) { return _mm_sub_epi32(a, _mm_set1_epi32(b)); }

  // ---- 32 codes
  static __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static I8x32 load_i8(const int8_t* p) { return load256(p); }
  // Bytes 0..15: low nibbles are elements 0..15, high nibbles 16..31.
  static I8x32 load_nibbles(const uint8_t* p) {
    const __m128i v = load128(p);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), _mm256_set1_epi8(15));
  }
  // 32 bytes: the low (shift 0) or high (shift 4) nibble of each.
  template <int kShift>
  static I8x32 load_nibble_run(const uint8_t* p) {
    return _mm256_and_si256(_mm256_srli_epi16(load256(p), kShift), _mm256_set1_epi8(15));
  }
  // Sets bit 4 of element j where bit j of the 32-bit word at p is set.
  static I8x32 or_fifth_bits(I8x32 x, const uint8_t* p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    const __m256i byte_of = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
    const __m256i bytes = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), byte_of), bit);
    return _mm256_or_si256(x, _mm256_and_si256(_mm256_cmpeq_epi8(bytes, bit), _mm256_set1_epi8(16)));
  }
  // Sets bits 4.. of element j from bits [shift, shift + bits) of byte j.
  template <int kBits>
  static I8x32 or_high_run(I8x32 x, const uint8_t* p, int shift) {
    const __m256i down = _mm256_srl_epi16(load256(p), _mm_cvtsi32_si128(shift));
    const __m256i kept = _mm256_and_si256(down, _mm256_set1_epi8((1 << kBits) - 1));
    return _mm256_or_si256(x, _mm256_slli_epi16(kept, 4));
  }
  // Bits [shift, shift + bits) of byte j of 32 as bits kAt and on of element j.
  template <int kBits, int kAt>
  static I8x32 bits_run(const uint8_t* p, int shift) {
    const __m256i down = _mm256_srl_epi16(load256(p), _mm_cvtsi32_si128(shift));
    return _mm256_slli_epi16(_mm256_and_si256(down, _mm256_set1_epi8((1 << kBits) - 1)), kAt);
  }
  static I8x32 or_i8(I8x32 a, I8x32 b) { return _mm256_or_si256(a, b); }
  static I8x32 all_i8(int8_t x) { return _mm256_set1_epi8(x); }
  static I8x32 sub_i8(I8x32 x, int8_t b) { return _mm256_sub_epi8(x, _mm256_set1_epi8(b)); }
  static I8x32 lookup(I8x32 x, const int8_t* table) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load128(table)), x);
  }
  // Nibbles as loaded by load_nibbles to the order low, high, low, high ...
  static I8x32 interleave(I8x32 x) {
    const __m128i lo = _mm256_castsi256_si128(x), hi = _mm256_extracti128_si256(x, 1);
    return _mm256_set_m128i(_mm_unpackhi_epi8(lo, hi), _mm_unpacklo_epi8(lo, hi));
  }

  // maddubs takes unsigned times signed and saturates at 16 bits: two products of at most 128 * 127 do not
  // reach it.
  static __m256i multiply(__m256i not_negative, __m256i x) {
#if defined(MILLRACE_HAS_AVX_VNNI)
    return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), not_negative, x);
#else
    return _mm256_madd_epi16(_mm256_maddubs_epi16(not_negative, x), _mm256_set1_epi16(1));
#endif
  }
  static __m256i multiply_add(__m256i to, __m256i not_negative, __m256i x) {
#if defined(MILLRACE_HAS_AVX_VNNI)
    return _mm256_dpbusd_avx_epi32(to, not_negative, x);
#else
    return _mm256_add_epi32(to, multiply(not_negative, x));
#endif
  }
  template <bool kUnsigned>
  static Partial dot(I8x32 w, I8x32 x) {
    if constexpr (kUnsigned) return multiply(w, x);
    return multiply(_mm256_sign_epi8(w, w), _mm256_sign_epi8(x, w));  // |w| * (x with w's sign)
  }
  // Two halves of 16, each with an integer scale of its own.
  static Partial dot_halves(I8x32 w, I8x32 x, int32_t first, int32_t second) {
    return _mm256_mullo_epi32(dot<false>(w, x),
                              _mm256_set_m128i(_mm_set1_epi32(second), _mm_set1_epi32(first)));
  }
  // The sums of four rows, one lane each.
  static I4 reduce(const Partial* p) {
    const __m256i four = _mm256_hadd_epi32(_mm256_hadd_epi32(p[0], p[1]), _mm256_hadd_epi32(p[2], p[3]));
    return _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  }
};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
