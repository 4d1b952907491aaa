// Four-bit codes of sixteen rows as floats: what products with units of weights (lowbit_task.h) are made of.
#pragma once

#include <stdint.h>

#include "kernels/cpu/attention/paged_float.h"
#include "kernels/cpu/matmul/lowbit_task.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// e2m1 by code.
alignas(64) inline constexpr float kE2M1Floats[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
// A float's power of two times this has its last place where a bf16 of the float has its own: added and
// subtracted again it rounds to nearest, ties to even.
inline constexpr float kRoundToBf16 = 0x1.8p16f;

#if defined(MILLRACE_SIMD_AVX512)

alignas(64) inline constexpr float kWholeFloats[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct LowbitCodes {
  using Words = __m512i;  // eight codes of each of sixteen rows
  static Words load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  // Sixteen codes of one row, eight bytes: each the first of its lane's eight.
  static Words spread(const uint8_t* p) {
    uint32_t eight[2];
    __builtin_memcpy(eight, p, sizeof eight);
    const __m512i both = _mm512_inserti64x4(_mm512_set1_epi32(static_cast<int>(eight[0])),
                                            _mm256_set1_epi32(static_cast<int>(eight[1])), 1);
    const __m512i shift = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
    return _mm512_srlv_epi32(both, shift);
  }
  // The permutation looks at four bits of its index, so that nothing need be cut off.
  template <int kColumn>
  static V16 e2m1(Words words) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * kColumn), _mm512_load_ps(kE2M1Floats));
  }
  template <int kColumn>
  static V16 whole(Words words) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * kColumn), _mm512_load_ps(kWholeFloats));
  }
  static V16 bytes(const uint8_t* p) { return _mm512_cvtepi32_ps(dwords(p)); }
  static V16 e8m0(const uint8_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(dwords(p), 23)); }
  static V16 power_of_two(V16 x) { return _mm512_and_ps(x, _mm512_set1_ps(__builtin_inff())); }

 private:
  static __m512i dwords(const uint8_t* p) { return _mm512_cvtepu8_epi32(Simd::load128(p)); }
};

#elif defined(MILLRACE_SIMD_AVX2)

struct LowbitCodes {
  struct Words {
    __m256i a, b;
  };
  static Words load(const uint8_t* p) { return {load256(p), load256(p + 32)}; }
  static Words spread(const uint8_t* p) {
    const __m256i shift = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0);
    const auto eight = [&](const uint8_t* at) {
      int32_t word;
      __builtin_memcpy(&word, at, sizeof word);
      return _mm256_srlv_epi32(_mm256_set1_epi32(word), shift);
    };
    return {eight(p), eight(p + 4)};
  }
  template <int kColumn>
  static V16 e2m1(Words words) {
    return {e2m1_of<kColumn>(words.a), e2m1_of<kColumn>(words.b)};
  }
  template <int kColumn>
  static V16 whole(Words words) {
    const auto half = [](__m256i w) {
      return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(w, 4 * kColumn), _mm256_set1_epi32(15)));
    };
    return {half(words.a), half(words.b)};
  }
  static V16 bytes(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(dwords(p)), _mm256_cvtepi32_ps(dwords(p + 8))};
  }
  static V16 e8m0(const uint8_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(dwords(p), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(dwords(p + 8), 23))};
  }
  static V16 power_of_two(V16 x) {
    const __m256 exponent = _mm256_set1_ps(__builtin_inff());
    return {_mm256_and_ps(x.a, exponent), _mm256_and_ps(x.b, exponent)};
  }

 private:
  static __m256i load256(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static __m256i dwords(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  // The magnitude by a permutation, which looks at three bits, and the sign put before it.
  template <int kColumn>
  static __m256 e2m1_of(__m256i w) {
    const __m256 magnitude =
        _mm256_permutevar8x32_ps(_mm256_load_ps(kE2M1Floats), _mm256_srli_epi32(w, 4 * kColumn));
    const __m256i sign = _mm256_slli_epi32(w, 28 - 4 * kColumn);
    return _mm256_or_ps(magnitude, _mm256_and_ps(_mm256_castsi256_ps(sign), _mm256_set1_ps(-0.0f)));
  }
};

#elif defined(MILLRACE_SIMD_NEON)

struct LowbitCodes {
  struct Words {
    uint32x4_t w[4];
  };
  static Words load(const uint8_t* p) {
    const auto four = [&](int i) { return vreinterpretq_u32_u8(vld1q_u8(p + 16 * i)); };
    return {{four(0), four(1), four(2), four(3)}};
  }
  static Words spread(const uint8_t* p) {
    const int32x4_t shift = {0, -4, -8, -12};
    const auto four = [&](int i) {
      uint16_t word;
      __builtin_memcpy(&word, p + 2 * i, sizeof word);
      return vshlq_u32(vdupq_n_u32(word), shift);
    };
    return {{four(0), four(1), four(2), four(3)}};
  }
  // Twice the value as a byte by table, then a number with 25 bits behind the point.
  template <int kColumn>
  static V16 e2m1(Words words) {
    constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const int8x16_t table = vld1q_s8(kDoubled);
    const auto four = [&](uint32x4_t w) {
      const uint8x16_t code = vreinterpretq_u8_u32(nibble<kColumn>(w));
      return vcvtq_n_f32_s32(vshlq_n_s32(vreinterpretq_s32_s8(vqtbl1q_s8(table, code)), 24), 25);
    };
    return {four(words.w[0]), four(words.w[1]), four(words.w[2]), four(words.w[3])};
  }
  template <int kColumn>
  static V16 whole(Words words) {
    const auto four = [&](uint32x4_t w) { return vcvtq_f32_u32(nibble<kColumn>(w)); };
    return {four(words.w[0]), four(words.w[1]), four(words.w[2]), four(words.w[3])};
  }
  static V16 bytes(const uint8_t* p) {
    const Words w = dwords(p);
    return {vcvtq_f32_u32(w.w[0]), vcvtq_f32_u32(w.w[1]), vcvtq_f32_u32(w.w[2]), vcvtq_f32_u32(w.w[3])};
  }
  static V16 e8m0(const uint8_t* p) {
    const Words w = dwords(p);
    const auto four = [&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(w.w[i], 23)); };
    return {four(0), four(1), four(2), four(3)};
  }
  static V16 power_of_two(V16 x) {
    const auto four = [](float32x4_t v) {
      return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v), vdupq_n_u32(0x7f800000u)));
    };
    return {four(x.a), four(x.b), four(x.c), four(x.d)};
  }

 private:
  template <int kColumn>
  static uint32x4_t nibble(uint32x4_t w) {
    if constexpr (kColumn > 0) w = vshrq_n_u32(w, 4 * kColumn);
    return vandq_u32(w, vdupq_n_u32(15));
  }
  static Words dwords(const uint8_t* p) {
    const uint8x16_t x = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(x)), high = vmovl_u8(vget_high_u8(x));
    return {{vmovl_u16(vget_low_u16(low)), vmovl_u16(vget_high_u16(low)), vmovl_u16(vget_low_u16(high)),
             vmovl_u16(vget_high_u16(high))}};
  }
};

#else

struct LowbitCodes {
  struct Words {
    uint32_t w[kLanes];
  };
  static Words load(const uint8_t* p) {
    Words words;
    __builtin_memcpy(words.w, p, sizeof words.w);
    return words;
  }
  static Words spread(const uint8_t* p) {
    Words words;
    for (int i = 0; i < kLanes; ++i) words.w[i] = static_cast<uint32_t>(p[i / 2] >> (i % 2 * 4));
    return words;
  }
  template <class Of>
  static V16 each(const Of& of) {
    float values[kLanes];
    for (int i = 0; i < kLanes; ++i) values[i] = of(i);
    return Simd::load(values);
  }
  template <int kColumn>
  static V16 e2m1(Words words) {
    return each([&](int i) { return kE2M1Floats[words.w[i] >> (4 * kColumn) & 15u]; });
  }
  template <int kColumn>
  static V16 whole(Words words) {
    return each([&](int i) { return static_cast<float>(words.w[i] >> (4 * kColumn) & 15u); });
  }
  static V16 bytes(const uint8_t* p) {
    return each([&](int i) { return static_cast<float>(p[i]); });
  }
  static V16 e8m0(const uint8_t* p) {
    return each([&](int i) { return FloatOps::bits_to_float(static_cast<uint32_t>(p[i]) << 23); });
  }
  static V16 power_of_two(V16 x) {
    return each(
        [&](int i) { return FloatOps::bits_to_float(FloatOps::float_to_bits(x.v[i]) & 0x7f800000u); });
  }
};

#endif

// The weights of a unit's sixteen rows, group of columns by group.
template <LowbitFormat kFormat>
struct LowbitWeights {
  V16 scale = Simd::zero(), minus_zero = Simd::zero();  // minus_zero: times the scale

  // Group `group` of the sixteen rows from `row` on.
  void take_scales(const uint8_t* unit, int group, int row) {
    if constexpr (lowbit_is_int4(kFormat)) {
      const uint8_t* at = unit + kLowbitCodeBytes + group * kLowbitInt4GroupBytes;
      uint16_t halves[kLanes];
      __builtin_memcpy(halves, at + 2 * row, sizeof halves);
      scale = Simd::load_f16(halves);
      const V16 zero = LowbitCodes::bytes(at + 2 * kLowbitUnitRows + row);
      minus_zero = Simd::sub(Simd::zero(), Simd::mul(zero, scale));
    } else {
      const uint8_t* at = unit + kLowbitCodeBytes + group * kLowbitUnitRows + row;
      scale = kFormat == LowbitFormat::kNVFP4 ? load_e4m3<Simd>(at) : LowbitCodes::e8m0(at);
    }
  }
  // Exact, but for the rounding to bf16 that an INT4 weight has: code times scale has sixteen bits.
  template <int kColumn>
  V16 column(LowbitCodes::Words words) const {
    if constexpr (lowbit_is_int4(kFormat)) {
      const V16 exact = Simd::fma(LowbitCodes::whole<kColumn>(words), scale, minus_zero);
      const V16 power = LowbitCodes::power_of_two(exact);
      const V16 shifted = Simd::fma(power, Simd::broadcast(kRoundToBf16), exact);
      return Simd::fma(power, Simd::broadcast(-kRoundToBf16), shifted);
    } else {
      return Simd::mul(LowbitCodes::e2m1<kColumn>(words), scale);
    }
  }
};

// Calls body(column, weights [kGroups] of sixteen rows each) for columns [0, columns) of a unit's rows from
// `row` on.
template <LowbitFormat kFormat, int kGroups, class Body>
[[gnu::always_inline]] inline void each_lowbit_column(const uint8_t* unit, int row, int64_t columns,
                                                      const Body& body) {
  constexpr int kGroupColumns = lowbit_group_columns(kFormat);
  constexpr int kEightBytes = 4 * kLowbitUnitRows;
  constexpr int64_t kAhead =
      4096;  // of the unit that follows: a page ahead of what the processor sees itself
  LowbitWeights<kFormat> weights[kGroups];
  for (int64_t first = 0; first < columns; first += kLowbitEight) {
    const uint8_t* codes = unit + first / kLowbitEight * kEightBytes + 4 * row;
    if (first % kGroupColumns == 0) {
      unroll<kGroups>([&](auto g) __attribute__((always_inline)) {
        weights[g].take_scales(unit, static_cast<int>(first / kGroupColumns), row + g * kLanes);
      });
    }
    LowbitCodes::Words words[kGroups];
    unroll<kGroups>([&](auto g) __attribute__((always_inline)) {
      words[g] = LowbitCodes::load(codes + 4 * kLanes * g);
      __builtin_prefetch(codes + 4 * kLanes * g + kAhead, 0, 2);
    });
    unroll_constants<kLowbitEight>([&](auto j) __attribute__((always_inline)) {
      V16 column[kGroups];
      unroll<kGroups>([&](auto g) __attribute__((always_inline)) {
        column[g] = weights[g].template column<j>(words[g]);
      });
      body(first + j, column);
    });
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
