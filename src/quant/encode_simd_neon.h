// The lanes of the encoders on ARM: groups of four blocks. What each operation means is said in
// encode_simd_scalar.h. Included inside the anonymous namespace of the NEON tables.
#pragma once

struct Simd {
  static constexpr int kBlocks = 4;
  using V = float32x4_t;
  using Mask = uint32x4_t;
  using Ints = int32x4_t;
  using Bytes = uint8x16_t;

  static V all(float x) { return vdupq_n_f32(x); }
  static V load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, V x) { vst1q_f32(p, x); }
  static V add(V a, V b) { return vaddq_f32(a, b); }
  static V sub(V a, V b) { return vsubq_f32(a, b); }
  static V mul(V a, V b) { return vmulq_f32(a, b); }
  static V div(V a, V b) { return vdivq_f32(a, b); }
  static V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
  static V min(V a, V b) { return vminq_f32(a, b); }
  static V max(V a, V b) { return vmaxq_f32(a, b); }
  static V abs(V a) { return vabsq_f32(a); }
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

  static int16x8_t shorts(V a, V b) {
    return vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(a)), vcvtnq_s32_f32(b));
  }
  static Bytes to_unsigned(const V* p) {
    return vqmovun_high_s16(vqmovun_s16(shorts(p[0], p[1])), shorts(p[2], p[3]));
  }
  static Bytes to_signed(const V* p) {
    return vreinterpretq_u8_s8(vqmovn_high_s16(vqmovn_s16(shorts(p[0], p[1])), shorts(p[2], p[3])));
  }
  // The products' upper bytes, rounded by the bits that are left: floor(floor(p / 256) + half) / 2^n is the
  template <int kOffset>
  static Bytes minus(Bytes x) {
    return kOffset == 0 ? x : vqsubq_u8(x, vdupq_n_u8(kOffset));
  }
  // same as of p itself.
  template <int kShift>
  static Bytes unsigned_codes(Bytes x, int m, int top) {
    const uint8x16_t factor = vdupq_n_u8(static_cast<uint8_t>(m));
    const uint16x8_t low = vmull_u8(vget_low_u8(x), vget_low_u8(factor)), high = vmull_high_u8(x, factor);
    const uint8x16_t upper = vuzp2q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
    return vminq_u8(vrshrq_n_u8(upper, kShift - 8), vdupq_n_u8(static_cast<uint8_t>(top)));
  }
  template <int kShift>
  static Bytes signed_codes(Bytes x, int m, int half) {
    const int8x16_t factor = vdupq_n_s8(static_cast<int8_t>(m)), signed_x = vreinterpretq_s8_u8(x);
    const int16x8_t low = vmull_s8(vget_low_s8(signed_x), vget_low_s8(factor)),
                    high = vmull_high_s8(signed_x, factor);
    const int8x16_t least = vdupq_n_s8(static_cast<int8_t>(-half)),
                    most = vdupq_n_s8(static_cast<int8_t>(half - 1));
    int8x16_t q;
    if constexpr (kShift == 8) {
      q = vrshrn_high_n_s16(vrshrn_n_s16(low, 8), high, 8);
    } else {
      q = vrshrq_n_s8(vuzp2q_s8(vreinterpretq_s8_s16(low), vreinterpretq_s8_s16(high)), kShift - 8);
    }
    return vreinterpretq_u8_s8(vminq_s8(vmaxq_s8(q, least), most));
  }
  static Ints zero_ints() { return vdupq_n_s32(0); }
  static Ints dot_unsigned(Ints sum, Bytes a, Bytes b) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vreinterpretq_s32_u32(vdotq_u32(vreinterpretq_u32_s32(sum), a, b));
#else
    const uint16x8_t low = vmull_u8(vget_low_u8(a), vget_low_u8(b)), high = vmull_high_u8(a, b);
    const uint32x4_t pairs = vpaddq_u32(vpaddlq_u16(low), vpaddlq_u16(high));
    return vaddq_s32(sum, vreinterpretq_s32_u32(pairs));
#endif
  }
  static Ints dot_signed(Ints sum, Bytes a, Bytes b) {
    const int8x16_t sa = vreinterpretq_s8_u8(a), sb = vreinterpretq_s8_u8(b);
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sum, sa, sb);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(sa), vget_low_s8(sb)), high = vmull_high_s8(sa, sb);
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
  }
  static Ints add_bytes(Ints sum, Bytes a) { return dot_unsigned(sum, a, vdupq_n_u8(1)); }
  static V to_float(Ints x) { return vcvtq_f32_s32(x); }

  static Ints add_misses(Ints sum, Bytes x, const uint8_t* limits, const uint8_t* values) {
    uint8x16_t code = vdupq_n_u8(0);
    for (int k = 0; k < 7; ++k) code = vsubq_u8(code, vcgeq_u8(x, vdupq_n_u8(limits[k])));
    const uint8x16_t off = vabdq_u8(x, vqtbl1q_u8(vcombine_u8(vld1_u8(values), vdup_n_u8(0)), code));
    return dot_unsigned(sum, off, off);
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
  static V load_halves(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
};
