// The lanes of the encoders with AVX2, FMA and F16C: groups of eight blocks, 0 to 3 in the lower halves of
// the registers and 4 to 7 in the upper ones, so that everything stays within halves. What each operation
// means is said in encode_simd_scalar.h. Included inside the anonymous namespace of encode_avx2.cpp.
#pragma once

struct Simd {
  static constexpr int kBlocks = 8;
  using V = __m256;
  using Mask = __m256;
  using Ints = __m256i;
  using Bytes = __m256i;

  static V all(float x) { return _mm256_set1_ps(x); }
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, V x) { _mm256_storeu_ps(p, x); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V div(V a, V b) { return _mm256_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V min(V a, V b) { return _mm256_min_ps(a, b); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
  static V abs(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
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

  // What lies above an int32 becomes its least number: only that side needs a bound before.
  static __m256i shorts(V a, V b) {
    const V most = all(32767.0f);
    return _mm256_packs_epi32(_mm256_cvtps_epi32(min(a, most)), _mm256_cvtps_epi32(min(b, most)));
  }
  static Bytes to_unsigned(const V* p) { return _mm256_packus_epi16(shorts(p[0], p[1]), shorts(p[2], p[3])); }
  static Bytes to_signed(const V* p) { return _mm256_packs_epi16(shorts(p[0], p[1]), shorts(p[2], p[3])); }
  template <int kOffset>
  static Bytes minus(Bytes x) {
    return kOffset == 0 ? x : _mm256_subs_epu8(x, _mm256_set1_epi8(kOffset));
  }
  // vpmulhrsw is (a b + 2^14) >> 15.
  template <int kShift>
  static Bytes unsigned_codes(Bytes x, int m, int top) {
    const __m256i factor = _mm256_set1_epi16(static_cast<int16_t>(m)), zero = _mm256_setzero_si256();
    const auto code = [&](__m256i wide) {
      return _mm256_mulhrs_epi16(_mm256_slli_epi16(wide, 15 - kShift), factor);
    };
    const __m256i codes =
        _mm256_packus_epi16(code(_mm256_unpacklo_epi8(x, zero)), code(_mm256_unpackhi_epi8(x, zero)));
    return _mm256_min_epu8(codes, _mm256_set1_epi8(static_cast<char>(top)));
  }
  // A byte in the upper half of its 16 bits, brought down with its sign.
  template <int kShift>
  static Bytes signed_codes(Bytes x, int m, int half) {
    const __m256i factor = _mm256_set1_epi16(static_cast<int16_t>(m)), zero = _mm256_setzero_si256();
    const auto code = [&](__m256i upper) {
      return _mm256_mulhrs_epi16(_mm256_srai_epi16(upper, kShift - 7), factor);
    };
    const __m256i codes =
        _mm256_packs_epi16(code(_mm256_unpacklo_epi8(zero, x)), code(_mm256_unpackhi_epi8(zero, x)));
    return _mm256_min_epi8(_mm256_max_epi8(codes, _mm256_set1_epi8(static_cast<char>(-half))),
                           _mm256_set1_epi8(static_cast<char>(half - 1)));
  }
  static Ints zero_ints() { return _mm256_setzero_si256(); }
  static Ints add_pairs(Ints sum, __m256i pairs) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static Ints dot_unsigned(Ints sum, Bytes a, Bytes b) { return add_pairs(sum, _mm256_maddubs_epi16(a, b)); }
  static Ints dot_signed(Ints sum, Bytes a, Bytes b) {
    return add_pairs(sum, _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a)));
  }
  static Ints add_bytes(Ints sum, Bytes a) { return dot_unsigned(sum, a, _mm256_set1_epi8(1)); }
  static V to_float(Ints x) { return _mm256_cvtepi32_ps(x); }

  static Ints add_misses(Ints sum, Bytes x, const uint8_t* limits, const uint8_t* values) {
    __m256i code = _mm256_setzero_si256();
    for (int k = 0; k < 7; ++k) {
      const __m256i limit = _mm256_set1_epi8(static_cast<char>(limits[k]));
      code = _mm256_sub_epi8(code, _mm256_cmpeq_epi8(_mm256_max_epu8(x, limit), x));
    }
    const __m128i table = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values));
    const __m256i value = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), code);
    const __m256i off = _mm256_or_si256(_mm256_subs_epu8(x, value), _mm256_subs_epu8(value, x));
    // The misses do not fit signed bytes: pairs of 16 bits, two sums of pairs per block.
    const __m256i zero = _mm256_setzero_si256(), low = _mm256_unpacklo_epi8(off, zero),
                  high = _mm256_unpackhi_epi8(off, zero);
    return _mm256_add_epi32(sum,
                            _mm256_hadd_epi32(_mm256_madd_epi16(low, low), _mm256_madd_epi16(high, high)));
  }

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
  static V load_halves(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
};
