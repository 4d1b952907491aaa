// The lanes of the quantizers on ARM: groups of four blocks. What each operation means is said in
// lanes_scalar.h.
#pragma once

#include "kernels/cpu/simd/neon.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

struct Lanes : Register {
  using Register::abs, Register::fma;  // besides those of words
  static constexpr int kBlocks = 4;
  using Mask = uint32x4_t;
  using Ints = int32x4_t;
  using Bytes = uint8x16_t;
  struct Words {
    int16x8_t a, b;
  };

  static V round(V a) { return vrndnq_f32(a); }
  static Mask greater(V a, V b) { return vcgtq_f32(a, b); }
  static bool any(Mask m) { return vmaxvq_u32(m) != 0; }
  static V select(Mask m, V a, V b) { return vbslq_f32(m, a, b); }

  static V load_part(const float* x, int stride, int t, int p) { return vld1q_f32(x + p * stride + 4 * t); }
  template <int kPart>
  static V spread(V x) {
    return vdupq_laneq_f32(x, kPart);
  }
  static V add_across(const V* p) { return vpaddq_f32(vpaddq_f32(p[0], p[1]), vpaddq_f32(p[2], p[3])); }
  static V max_across(const V* p) { return vpmaxq_f32(vpmaxq_f32(p[0], p[1]), vpmaxq_f32(p[2], p[3])); }
  static V min_across(const V* p) { return vpminq_f32(vpminq_f32(p[0], p[1]), vpminq_f32(p[2], p[3])); }

  static Words all_words(int x) {
    const int16x8_t all = vdupq_n_s16(static_cast<int16_t>(x));
    return {all, all};
  }
  static Words words(const V* p) {
    const auto part = [&](int i) { return vreinterpretq_s16_f32(p[i]); };
    return {vuzp1q_s16(part(0), part(1)), vuzp1q_s16(part(2), part(3))};
  }
  static Bytes high_bytes(Words x) { return vuzp2q_u8(vreinterpretq_u8_s16(x.a), vreinterpretq_u8_s16(x.b)); }
  static Bytes low_bytes(Words x) { return vuzp1q_u8(vreinterpretq_u8_s16(x.a), vreinterpretq_u8_s16(x.b)); }
  static void split(Words x, Bytes& high, Bytes& low) {
    high = high_bytes(x);
    low = veorq_u8(low_bytes(x), vdupq_n_u8(0x80));
  }
  static Words add_saturated(Words x, Words y) { return {vqaddq_s16(x.a, y.a), vqaddq_s16(x.b, y.b)}; }
  static Words sub_saturated(Words x, Words y) { return {vqsubq_s16(x.a, y.a), vqsubq_s16(x.b, y.b)}; }
  template <int kShift>
  static Words round_shift(Words x) {
    return {vrshrq_n_s16(x.a, kShift), vrshrq_n_s16(x.b, kShift)};
  }
  static Words multiplied(Words x, Words by) { return {vqrdmulhq_s16(x.a, by.a), vqrdmulhq_s16(x.b, by.b)}; }
  static Words fma(Words x, Words by, Words plus) {
#if defined(__ARM_FEATURE_QRDMX)
    return {vqrdmlahq_s16(plus.a, x.a, by.a), vqrdmlahq_s16(plus.b, x.b, by.b)};
#else
    return add_saturated(plus, multiplied(x, by));
#endif
  }
  static Words abs(Words x) { return {vabsq_s16(x.a), vabsq_s16(x.b)}; }
  static Bytes all_bytes(int x) { return vdupq_n_u8(static_cast<uint8_t>(x)); }
  static Bytes add_saturated(Bytes a, Bytes b) {
    return vreinterpretq_u8_s8(vqaddq_s8(vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b)));
  }
  static Bytes sub_saturated(Bytes a, Bytes b) {
    return vreinterpretq_u8_s8(vqsubq_s8(vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b)));
  }
  template <int kShift>
  static Bytes shift(Bytes x) {
    return vreinterpretq_u8_s8(vshrq_n_s8(vreinterpretq_s8_u8(x), kShift));
  }
  template <int kShift>
  static Bytes round_shift(Bytes x) {
    return vreinterpretq_u8_s8(vrshrq_n_s8(vreinterpretq_s8_u8(x), kShift));
  }
  // Sums begin with the bits of kMagic, and are then floats but for a subtraction: a conversion takes four
  // times as long. They stay below 2^22.
  static constexpr float kSumsFrom = 12582912.0f;
  static Ints zero_ints() { return vreinterpretq_s32_f32(vdupq_n_f32(kSumsFrom)); }
  static Ints dot_signed(Ints sum, Bytes a, Bytes b) {
    const int8x16_t sa = vreinterpretq_s8_u8(a), sb = vreinterpretq_s8_u8(b);
#if defined(MILLRACE_HAS_DOTPROD)
    return vdotq_s32(sum, sa, sb);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(sa), vget_low_s8(sb)), high = vmull_high_s8(sa, sb);
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
  }
  static Ints add_squares(Ints sum, Bytes a) { return dot_signed(sum, a, a); }
  static Ints sum_signed(Ints sum, Bytes a) {
#if defined(MILLRACE_HAS_DOTPROD)
    return vdotq_s32(sum, vreinterpretq_s8_u8(a), vdupq_n_s8(1));
#else
    const int16x8_t pairs = vpaddlq_s8(vreinterpretq_s8_u8(a));
    return vpadalq_s16(sum, pairs);
#endif
  }
  static V to_float(Ints x) { return vsubq_f32(vreinterpretq_f32_s32(x), vdupq_n_f32(kSumsFrom)); }
  static V to_float(Ints high, Ints low) { return fma(to_float(high), all(256.0f), to_float(low)); }

  static Ints add_misses(Ints sum, Bytes x, Bytes level) {
    const uint8x16_t off = vabdq_u8(x, level);
    return dot_small(sum, off, off);
  }
  template <int kShift>
  static Bytes look_up(const uint8_t* table, Bytes x) {
    const uint8x16x2_t both = {{vld1q_u8(table), vld1q_u8(table + 16)}};
    if constexpr (kShift == 0) return vqtbl2q_u8(both, x);
    if constexpr (kShift > 0) return vqtbl2q_u8(both, vshrq_n_u8(x, kShift));
  }
  static Bytes nibbles(Bytes low, Bytes high) { return vsliq_n_u8(low, high, 4); }
  static Bytes and_bytes(Bytes x, int mask) { return vandq_u8(x, all_bytes(mask)); }
  static Bytes or_bytes(Bytes a, Bytes b) { return vorrq_u8(a, b); }
  static Bytes min_bytes(Bytes a, Bytes b) { return vminq_u8(a, b); }
  static Bytes shift_down(Bytes x, Bytes by) { return vshlq_u8(x, vnegq_s8(vreinterpretq_s8_u8(by))); }
  static Ints dot_small(Ints sum, Bytes a, Bytes b) {
#if defined(MILLRACE_HAS_DOTPROD)
    return vreinterpretq_s32_u32(vdotq_u32(vreinterpretq_u32_s32(sum), a, b));
#else
    const uint16x8_t low = vmull_u8(vget_low_u8(a), vget_low_u8(b)), high = vmull_high_u8(a, b);
    const uint32x4_t pairs = vpaddq_u32(vpaddlq_u16(low), vpaddlq_u16(high));
    return vaddq_s32(sum, vreinterpretq_s32_u32(pairs));
#endif
  }
  static Bytes with_signs(Bytes codes, Bytes signs) { return vsliq_n_u8(codes, vshrq_n_u8(signs, 7), 3); }
  static V power_of(V x) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x7f800000u)));
  }

  // Words [4 quads][4 blocks], transposed.
  static void store_codes(const Bytes* quads, uint8_t* out, int stride) {
    const auto words = [&](int t) { return vreinterpretq_u32_u8(quads[t]); };
    const uint32x4_t a = vzip1q_u32(words(0), words(2)), b = vzip2q_u32(words(0), words(2)),
                     c = vzip1q_u32(words(1), words(3)), d = vzip2q_u32(words(1), words(3));
    vst1q_u8(out, vreinterpretq_u8_u32(vzip1q_u32(a, c)));
    vst1q_u8(out + stride, vreinterpretq_u8_u32(vzip2q_u32(a, c)));
    vst1q_u8(out + 2 * stride, vreinterpretq_u8_u32(vzip1q_u32(b, d)));
    vst1q_u8(out + 3 * stride, vreinterpretq_u8_u32(vzip2q_u32(b, d)));
  }

  static void store_halves(uint16_t* out, V x) { vst1_u16(out, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
