// Rotary position embedding of a head, its angles, and dropout of a row: plain loops that compilers
// vectorize.
#pragma once

#include "kernels/cpu/fused/float_rows.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// The angle without its quarter turns, in double; sine and cosine of what is left, at most pi / 4, by their
// series (errors below 2^-25), exchanged and negated by the quarter.
void rotary_angles_row(const float* inv_freq, int64_t half, int32_t position, float magnitude, float* cosines,
                       float* sines) {
  constexpr double kQuarters = 0.6366197723675814, kQuarterHigh = 1.5707963267948966,
                   kMagic = 6755399441055744.0;
  for (int64_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * static_cast<double>(inv_freq[i]);
    const double shifted = angle * kQuarters + kMagic;  // its last bit is worth 1
    const double turned = shifted - kMagic;
    const auto r = static_cast<float>(angle - turned * kQuarterHigh);
    int64_t bits;
    __builtin_memcpy(&bits, &shifted, 8);
    const auto quarter = static_cast<uint32_t>(bits) & 3u;
    const float q = r * r;
    float s = 2.75573192e-6f * q - 1.98412698e-4f;
    s = s * q + 8.33333333e-3f;
    s = s * q - 1.66666667e-1f;
    const float sine = s * q * r + r;
    float c = 2.48015873e-5f * q - 1.38888889e-3f;
    c = c * q + 4.16666667e-2f;
    c = c * q - 0.5f;
    const float cosine = c * q + 1.0f;
    const bool exchanged = (quarter & 1u) != 0;
    const float a = exchanged ? sine : cosine, b = exchanged ? cosine : sine;
    cosines[i] = (quarter == 1 || quarter == 2 ? -a : a) * magnitude;
    sines[i] = (quarter >= 2 ? -b : b) * magnitude;
  }
}

struct PairOf16 {
  V16 first, second;
};
inline PairOf16 turn(V16 a, V16 b, V16 c, V16 s) {
  return {Simd::sub(Simd::mul(a, c), Simd::mul(b, s)), Simd::fma(b, c, Simd::mul(a, s))};
}

inline float element(const FloatRow& row, int64_t i) {
  float lanes[kLanes];
  Simd::store(lanes, load_last(row, i, 1, 0.0f));
  return lanes[0];
}
inline void put(const FloatRow& row, int64_t i, float x) { store_last(row, i, 1, Simd::broadcast(x)); }

// Sixteen neighbours: eight pairs (2 i, 2 i + 1).
inline void rotate_interleaved(const FloatRow& x, const float* cosines, const float* sines, int64_t half,
                               const FloatRow& y) {
  int64_t i = 0;
  for (; i + kLanes / 2 <= half; i += kLanes / 2) {
    float v[kLanes], out[kLanes];
    Simd::store(v, load16(x, 2 * i));
    for (int j = 0; j < kLanes / 2; ++j) {
      const float a = v[2 * j], b = v[2 * j + 1], c = cosines[i + j], s = sines[i + j];
      out[2 * j] = a * c - b * s;
      out[2 * j + 1] = __builtin_fmaf(b, c, a * s);
    }
    store16(y, 2 * i, Simd::load(out));
  }
  for (; i < half; ++i) {
    const float a = element(x, 2 * i), b = element(x, 2 * i + 1);
    put(y, 2 * i, a * cosines[i] - b * sines[i]);
    put(y, 2 * i + 1, __builtin_fmaf(b, cosines[i], a * sines[i]));
  }
}

void rotate_row(FloatRow x, const float* cosines, const float* sines, int64_t half, bool interleaved,
                int64_t head_dim, FloatRow y) {
  if (interleaved) {
    rotate_interleaved(x, cosines, sines, half, y);
  } else {
    const FloatRow c{const_cast<float*>(cosines), MR_F32}, s{const_cast<float*>(sines), MR_F32};
    each16_of(half, [&](const auto& part, int64_t i) {
      const PairOf16 turned = turn(part.load(x, i), part.load(x, i + half), part.load(c, i), part.load(s, i));
      part.store(y, i, turned.first);
      part.store(y, i + half, turned.second);
    });
  }
  if (x.data == y.data) return;
  each16_of(head_dim - 2 * half,
            [&](const auto& part, int64_t i) { part.store(y, 2 * half + i, part.load(x, 2 * half + i)); });
}

// Eight counters side by side, with AVX-512 sixteen; word w of counter k belongs to column 4 k + w.
#if defined(MILLRACE_SIMD_AVX512)
constexpr int kDropoutColumns = 64;
#else
constexpr int kDropoutColumns = 32;
#endif
#if defined(MILLRACE_SIMD_NEON)
// Four counters in a register of 32 bits each: products of 64 bits in pairs, then parted by uzp. A round
// waits for the one before: two registers go side by side.
struct PhiloxHalves {
  uint32x4_t low, high;
};
[[gnu::always_inline]] inline PhiloxHalves philox_multiply(uint32x4_t x, uint32x2_t by) {
  const uint32x4_t first = vreinterpretq_u32_u64(vmull_lane_u32(vget_low_u32(x), by, 0)),
                   second = vreinterpretq_u32_u64(vmull_high_lane_u32(x, by, 0));
  return {vuzp1q_u32(first, second), vuzp2q_u32(first, second)};
}
struct PhiloxWords {
  uint32x4_t c0, c1, c2, c3;
};
[[gnu::always_inline]] inline PhiloxWords philox_round(const PhiloxWords& c, uint32x2_t by0, uint32x2_t by1,
                                                       uint32x4_t key0, uint32x4_t key1) {
  const PhiloxHalves a = philox_multiply(c.c0, by0), b = philox_multiply(c.c2, by1);
  return {veorq_u32(b.high, veorq_u32(c.c1, key0)), b.low, veorq_u32(a.high, veorq_u32(c.c3, key1)), a.low};
}
inline void dropout_words(const DropoutRow& op, const philox::Keys& keys, int64_t first_col, U32x16* words) {
  const uint32x4_t lane = {0, 1, 2, 3}, first = vdupq_n_u32(static_cast<uint32_t>(first_col / 4));
  const uint32x2_t by0 = vdup_n_u32(philox::kMultiply0), by1 = vdup_n_u32(philox::kMultiply1);
  PhiloxWords c = {vaddq_u32(lane, first), vdupq_n_u32(op.row), vdupq_n_u32(op.offset_low),
                   vdupq_n_u32(op.offset_high)};
  PhiloxWords d = c;
  d.c0 = vaddq_u32(d.c0, vdupq_n_u32(4));
  for (int round = 0; round < philox::kRounds; ++round) {
    const uint32x4_t key0 = vdupq_n_u32(keys.first[round]), key1 = vdupq_n_u32(keys.second[round]);
    c = philox_round(c, by0, by1, key0, key1);
    d = philox_round(d, by0, by1, key0, key1);
  }
  const uint32x4x4_t front{{c.c0, c.c1, c.c2, c.c3}}, back{{d.c0, d.c1, d.c2, d.c3}};
  vst4q_u32(reinterpret_cast<uint32_t*>(&words[0]), front);
  vst4q_u32(reinterpret_cast<uint32_t*>(&words[1]), back);
}
#elif defined(MILLRACE_SIMD_AVX512)
// A product looks at the lower halves of lanes of 64 bits: what is in the upper ones may stay. A key goes to
// both, for so it comes with the load of the operation that takes it. A round waits for the one before: two
// sets of counters go side by side.
struct PhiloxWords {
  __m512i c0, c1, c2, c3;
};
[[gnu::always_inline]] inline PhiloxWords philox_round(const PhiloxWords& c, __m512i by0, __m512i by1,
                                                       uint32_t key0, uint32_t key1) {
  const auto key = [](uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); };
  const __m512i a = _mm512_mul_epu32(c.c0, by0), b = _mm512_mul_epu32(c.c2, by1);
  constexpr int kXor3 = 0x96;
  return {_mm512_ternarylogic_epi32(_mm512_srli_epi64(b, 32), c.c1, key(key0), kXor3), b,
          _mm512_ternarylogic_epi32(_mm512_srli_epi64(a, 32), c.c3, key(key1), kXor3), a};
}
// Two words of each counter, then four.
[[gnu::always_inline]] inline void store_words(const PhiloxWords& c, U32x16* words) {
  const __m512i front = _mm512_mask_mov_epi32(c.c0, 0xaaaa, _mm512_slli_epi64(c.c1, 32));
  const __m512i back = _mm512_mask_mov_epi32(c.c2, 0xaaaa, _mm512_slli_epi64(c.c3, 32));
  const __m512i low = _mm512_unpacklo_epi64(front, back), high = _mm512_unpackhi_epi64(front, back);
  __builtin_memcpy(&words[0], &low, sizeof low);
  __builtin_memcpy(&words[1], &high, sizeof high);
}
inline void dropout_words(const DropoutRow& op, const philox::Keys& keys, int64_t first_col, U32x16* words) {
  const auto all = [](uint32_t x) { return _mm512_set1_epi64(x); };
  const __m512i lane = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);  // counters 0 to 3 in the even lanes
  const __m512i by0 = all(philox::kMultiply0), by1 = all(philox::kMultiply1);
  PhiloxWords c = {_mm512_add_epi64(lane, all(static_cast<uint32_t>(first_col / 4))), all(op.row),
                   all(op.offset_low), all(op.offset_high)};
  PhiloxWords d = c;
  d.c0 = _mm512_add_epi64(d.c0, all(8));
  unroll<philox::kRounds>([&](auto round) __attribute__((always_inline)) {
    c = philox_round(c, by0, by1, keys.first[round], keys.second[round]);
    d = philox_round(d, by0, by1, keys.first[round], keys.second[round]);
  });
  store_words(c, words);
  store_words(d, words + 2);
}
#else
// The lower 32 bits of each lane of 64, times 32 bits.
[[gnu::always_inline]] inline void multiply_words(const U64x8& x, uint32_t by, U64x8& to) {
#if defined(MILLRACE_SIMD_AVX2)
  const __m256i factor = _mm256_set1_epi64x(by);
  __m256i half[2];
  __builtin_memcpy(half, &x, sizeof x);
  half[0] = _mm256_mul_epu32(half[0], factor);
  half[1] = _mm256_mul_epu32(half[1], factor);
  __builtin_memcpy(&to, half, sizeof to);
#else
  to = (x & 0xffffffffu) * uint64_t{by};
#endif
}
// What is in the upper halves of lanes may stay there.
inline void dropout_words(const DropoutRow& op, const philox::Keys& keys, int64_t first_col, U32x16* words) {
  constexpr uint64_t kLow = 0xffffffffu;
  const uint64_t first = static_cast<uint64_t>(first_col / 4);
  const U64x8 lane = {0, 1, 2, 3, 4, 5, 6, 7}, zero = {};
  U64x8 c0 = lane + first, c1 = zero + op.row, c2 = zero + op.offset_low, c3 = zero + op.offset_high;
  for (int round = 0; round < philox::kRounds; ++round) {
    U64x8 a, b;
    multiply_words(c0, philox::kMultiply0, a);
    multiply_words(c2, philox::kMultiply1, b);
    c0 = (b >> 32) ^ c1 ^ uint64_t { keys.first[round] };
    c2 = (a >> 32) ^ c3 ^ uint64_t { keys.second[round] };
    c1 = b;
    c3 = a;
  }
  const U64x8 front = (c0 & kLow) | c1 << 32, back = (c2 & kLow) | c3 << 32;  // two words of each counter
  const U64x8 low = __builtin_shufflevector(front, back, 0, 8, 1, 9, 2, 10, 3, 11);
  const U64x8 high = __builtin_shufflevector(front, back, 4, 12, 5, 13, 6, 14, 7, 15);
  __builtin_memcpy(&words[0], &low, sizeof low);
  __builtin_memcpy(&words[1], &high, sizeof high);
}
#endif

// y where the lane's word is not below, else zero.
[[gnu::always_inline]] inline V16 keep(V16 y, const U32x16& words, uint32_t below) {
#if defined(MILLRACE_SIMD_AVX512)
  const __mmask16 kept =
      _mm512_cmpge_epu32_mask(reinterpret_cast<__m512i>(words), _mm512_set1_epi32(static_cast<int>(below)));
  return _mm512_maskz_mov_ps(kept, y);
#else
  U32x16 bits;
  static_assert(sizeof y == sizeof bits);
  __builtin_memcpy(&bits, &y, sizeof bits);
  bits &= reinterpret_cast<U32x16>(words >= below);
  __builtin_memcpy(&y, &bits, sizeof bits);
  return y;
#endif
}

void dropout_row(const DropoutRow& op, const philox::Keys& keys) {
  const V16 scale = Simd::broadcast(op.scale);
  for (int64_t begin = 0; begin < op.cols; begin += kDropoutColumns) {
    U32x16 words[kDropoutColumns / kLanes];
    dropout_words(op, keys, op.first_col + begin, words);
    const int64_t cols = op.cols - begin < kDropoutColumns ? op.cols - begin : kDropoutColumns;
    each16_of(cols, [&](const auto& part, int64_t i) {
      const V16 y = Simd::mul(part.load(op.x, begin + i), scale);
      part.store(op.y, begin + i, keep(y, words[i / kLanes], op.drop_below));
    });
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
