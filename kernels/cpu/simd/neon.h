// The vector types on ARM: a register of four floats, and Simd, sixteen lanes in four registers. Base ARMv8,
// and in the targets that have it the dot product instruction of ARMv8.2.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "kernels/cpu/simd/target.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/quant/blocks.h"
#if !defined(MILLRACE_SIMD_NEON)
#error "define MILLRACE_TARGET_NEON, _NEON_DOTPROD or _NEON_I8MM before the first include"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// One register of four floats.
struct Register {
  using V = float32x4_t;
  static V all(float x) { return vdupq_n_f32(x); }
  static V load(const float* p) { return vld1q_f32(p); }
  static V load_halves(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static void store(float* p, V x) { vst1q_f32(p, x); }
  static V add(V a, V b) { return vaddq_f32(a, b); }
  static V sub(V a, V b) { return vsubq_f32(a, b); }
  static V mul(V a, V b) { return vmulq_f32(a, b); }
  static V div(V a, V b) { return vdivq_f32(a, b); }
  static V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
  static V min(V a, V b) { return vminq_f32(a, b); }
  static V max(V a, V b) { return vmaxq_f32(a, b); }
  static V abs(V a) { return vabsq_f32(a); }
};

struct Simd {
  using R = Register;
  static constexpr int kFloatTileRows = 2, kFloatTileM = 2;  // sixteen registers of four floats
  // Query rows that share loads in attention, and blocks taken at once.
  static constexpr int kAttendRows = 4, kAttendAtOnce = 1;
  struct V16 {
    float32x4_t a, b, c, d;
  };                       // lanes 0-3, 4-7, 8-11, 12-15
  using F4 = float32x4_t;  // one lane per row of a tile
  using I4 = int32x4_t;
  struct I8x32 {
    int8x16_t lo, hi;
  };
  using Partial = int32x4_t;  // a block's integer sum in four parts

  // ---- 16 floats
  static V16 broadcast(float x) {
    const float32x4_t v = R::all(x);
    return {v, v, v, v};
  }
  static V16 zero() { return broadcast(0.0f); }
  static V16 load(const float* p) { return {R::load(p), R::load(p + 4), R::load(p + 8), R::load(p + 12)}; }
  static V16 load_f16(const uint16_t* p) {
    const float16x8_t lo = vreinterpretq_f16_u16(vld1q_u16(p)), hi = vreinterpretq_f16_u16(vld1q_u16(p + 8));
    return {vcvt_f32_f16(vget_low_f16(lo)), vcvt_high_f32_f16(lo), vcvt_f32_f16(vget_low_f16(hi)),
            vcvt_high_f32_f16(hi)};
  }
  static V16 load_bf16(const uint16_t* p) {  // widened by zip, as above
    const uint16x8_t lo = vld1q_u16(p), hi = vld1q_u16(p + 8), zero = vdupq_n_u16(0);
    return {vreinterpretq_f32_u16(vzip1q_u16(zero, lo)), vreinterpretq_f32_u16(vzip2q_u16(zero, lo)),
            vreinterpretq_f32_u16(vzip1q_u16(zero, hi)), vreinterpretq_f32_u16(vzip2q_u16(zero, hi))};
  }
  // The upper halves of floats, then a factor for the difference of the exponents' biases.
  static float32x4_t e4m3_from_upper(uint16x4_t upper) {
    return vmulq_n_f32(vreinterpretq_f32_u32(vshll_n_u16(upper, 16)), 0x1p120f);
  }
  static V16 widen_e4m3(const uint8_t* p) {
    const uint8x16_t x = vld1q_u8(p), magnitude = vandq_u8(x, vdupq_n_u8(0x7f));
    const uint8x16_t nan = vceqq_u8(magnitude, vdupq_n_u8(0x7f)), sign = vandq_u8(x, vdupq_n_u8(0x80));
    const auto upper = [](uint8x8_t m, uint8x8_t n, uint8x8_t s) {
      const uint16x8_t number = vshll_n_u8(m, 4), wide_nan = vshll_n_u8(n, 7);
      return vorrq_u16(vorrq_u16(number, wide_nan), vshll_n_u8(s, 8));
    };
    const uint16x8_t lo = upper(vget_low_u8(magnitude), vget_low_u8(nan), vget_low_u8(sign)),
                     hi = upper(vget_high_u8(magnitude), vget_high_u8(nan), vget_high_u8(sign));
    return {e4m3_from_upper(vget_low_u16(lo)), e4m3_from_upper(vget_high_u16(lo)),
            e4m3_from_upper(vget_low_u16(hi)), e4m3_from_upper(vget_high_u16(hi))};
  }
  static void store(float* p, V16 x) {
    R::store(p, x.a);
    R::store(p + 4, x.b);
    R::store(p + 8, x.c);
    R::store(p + 12, x.d);
  }
  // Rounded to nearest even; a NaN stays one.
  static void store_f16(uint16_t* p, V16 x) {
    vst1q_u16(p, vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(x.a), vcvt_f16_f32(x.b))));
    vst1q_u16(p + 8, vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(x.c), vcvt_f16_f32(x.d))));
  }
  static uint16x4_t bf16_bits(float32x4_t x) {
    const uint32x4_t u = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t nan = vorrq_u32(u, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, nan), 16);
  }
  // Upper halves and one more where the lower are above the middle, or there and the upper odd. Halves are
  // parted by uzp, which two units do; shifts have one.
  static uint16x8_t bf16_bits_of_numbers(float32x4_t a, float32x4_t b) {
    const uint16x8_t x = vreinterpretq_u16_f32(a), y = vreinterpretq_u16_f32(b);
    const uint16x8_t lower = vuzp1q_u16(x, y), upper = vuzp2q_u16(x, y);
    const uint16x8_t odd = vandq_u16(upper, vdupq_n_u16(1));
    return vsubq_u16(upper, vcgtq_u16(lower, vsubq_u16(vdupq_n_u16(0x8000), odd)));
  }
  [[gnu::noinline]] static void store_bf16_of_any(uint16_t* p, float32x4_t a, float32x4_t b, float32x4_t c,
                                                  float32x4_t d) {
    vst1q_u16(p, vcombine_u16(bf16_bits(a), bf16_bits(b)));
    vst1q_u16(p + 8, vcombine_u16(bf16_bits(c), bf16_bits(d)));
  }
  [[gnu::always_inline]] static void store_bf16(uint16_t* p, V16 x) {
    // A NaN, or infinities of both signs: then the sum of all is one.
    const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.b), vaddq_f32(x.c, x.d));
    const float sum = vaddv_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
    if (__builtin_expect(sum != sum, 0)) return store_bf16_of_any(p, x.a, x.b, x.c, x.d);
    vst1q_u16(p, bf16_bits_of_numbers(x.a, x.b));
    vst1q_u16(p + 8, bf16_bits_of_numbers(x.c, x.d));
  }
  static V16 add(V16 x, V16 y) {
    return {R::add(x.a, y.a), R::add(x.b, y.b), R::add(x.c, y.c), R::add(x.d, y.d)};
  }
  static V16 sub(V16 x, V16 y) {
    return {R::sub(x.a, y.a), R::sub(x.b, y.b), R::sub(x.c, y.c), R::sub(x.d, y.d)};
  }
  static V16 mul(V16 x, V16 y) {
    return {R::mul(x.a, y.a), R::mul(x.b, y.b), R::mul(x.c, y.c), R::mul(x.d, y.d)};
  }
  static V16 div(V16 x, V16 y) {
    return {R::div(x.a, y.a), R::div(x.b, y.b), R::div(x.c, y.c), R::div(x.d, y.d)};
  }
  static V16 max(V16 x, V16 y) {
    return {R::max(x.a, y.a), R::max(x.b, y.b), R::max(x.c, y.c), R::max(x.d, y.d)};
  }
  static V16 min(V16 x, V16 y) {
    return {R::min(x.a, y.a), R::min(x.b, y.b), R::min(x.c, y.c), R::min(x.d, y.d)};
  }
  // The same where y is a bound, not zero and no NaN; where any result does of a NaN; of x, which is not
  // negative, and |y|.
  static V16 at_least(V16 x, V16 y) { return max(x, y); }
  static V16 at_most(V16 x, V16 y) { return min(x, y); }
  static V16 larger(V16 x, V16 y) { return max(x, y); }
  static V16 larger_size(V16 x, V16 y) { return max(x, abs(y)); }
  static V16 abs(V16 x) { return {R::abs(x.a), R::abs(x.b), R::abs(x.c), R::abs(x.d)}; }
  static V16 fma(V16 x, V16 y, V16 z) {
    return {R::fma(x.a, y.a, z.a), R::fma(x.b, y.b, z.b), R::fma(x.c, y.c, z.c), R::fma(x.d, y.d, z.d)};
  }
  // x * y + z[0], whose four lanes are equal.
  static V16 fma_constant(V16 x, V16 y, const float* z) {
    const auto load = [&] {
      float32x4_t to;
      asm volatile("ldr %q0, %1" : "=w"(to) : "m"(*reinterpret_cast<const float32x4_t*>(z)));
      return to;
    };
    return {vfmaq_f32(load(), x.a, y.a), vfmaq_f32(load(), x.b, y.b), vfmaq_f32(load(), x.c, y.c),
            vfmaq_f32(load(), x.d, y.d)};
  }
  // a < b ? x : y
  static V16 select_less(V16 a, V16 b, V16 x, V16 y) {
    return {vbslq_f32(vcltq_f32(a.a, b.a), x.a, y.a), vbslq_f32(vcltq_f32(a.b, b.b), x.b, y.b),
            vbslq_f32(vcltq_f32(a.c, b.c), x.c, y.c), vbslq_f32(vcltq_f32(a.d, b.d), x.d, y.d)};
  }
  // a < b ? 0 : y
  static float32x4_t zero_if_less(float32x4_t a, float32x4_t b, float32x4_t y) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(a, b)));
  }
  static V16 zero_if_less(V16 a, V16 b, V16 y) {
    return {zero_if_less(a.a, b.a, y.a), zero_if_less(a.b, b.b, y.b), zero_if_less(a.c, b.c, y.c),
            zero_if_less(a.d, b.d, y.d)};
  }
  static float32x4_t add_exponent(float32x4_t a, float32x4_t magic) {
    return vreinterpretq_f32_u32(
        vaddq_u32(vreinterpretq_u32_f32(a), vshlq_n_u32(vreinterpretq_u32_f32(magic), 23)));
  }
  // a * 2^n where the low bits of `magic` hold n: adds them to a's exponent.
  static V16 add_exponent(V16 a, V16 m) {
    return {add_exponent(a.a, m.a), add_exponent(a.b, m.b), add_exponent(a.c, m.c), add_exponent(a.d, m.d)};
  }
  static float reduce_sum(V16 x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(vpadd_f32(two, two), 0);
  }
  static float reduce_max(V16 x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.b), vmaxq_f32(x.c, x.d))); }
  // 16 floats of magnitude at most 127 to int8, to nearest even; returns their sum.
  static int32_t round_to_int8(V16 x, int8_t* out) {
    // Adding 1.5 * 2^23 leaves the rounded integer in the low bits; both units add, one converts.
    const float32x4_t magic = vdupq_n_f32(12582912.0f);
    const auto low_halves = [&](float32x4_t a, float32x4_t b) {
      return vuzp1q_s16(vreinterpretq_s16_f32(vaddq_f32(a, magic)),
                        vreinterpretq_s16_f32(vaddq_f32(b, magic)));
    };
    const int16x8_t lo = low_halves(x.a, x.b), hi = low_halves(x.c, x.d);
    vst1q_s8(out, vuzp1q_s8(vreinterpretq_s8_s16(lo), vreinterpretq_s8_s16(hi)));
    return vaddvq_s16(vaddq_s16(lo, hi));
  }

  // The low byte of each float's bits.
  static void store_low_bytes(V16 x, int8_t* out) {
    const auto low_halves = [](float32x4_t a, float32x4_t b) {
      return vreinterpretq_s8_s16(vuzp1q_s16(vreinterpretq_s16_f32(a), vreinterpretq_s16_f32(b)));
    };
    vst1q_s8(out, vuzp1q_s8(low_halves(x.a, x.b), low_halves(x.c, x.d)));
  }

  // ---- 16 sums of products of int8, four at a time: `to` += of lane j the codes 4 j .. 4 j + 3 times `by`
  struct I16 {
    int32x4_t a, b, c, d;
  };
  struct Codes {
    int8x16_t a, b, c, d;
  };
  using Keys = Codes;
  static I16 begin_keys(int32_t) { return zero_sums(); }
  static Keys load_keys(const uint8_t* p) { return load_codes(p); }
  static I16 dot_keys(I16 to, Keys keys, const int8_t* by) { return dot_not_negative(to, keys, by); }
  static I16 zero_sums() {
    const int32x4_t zero = vdupq_n_s32(0);
    return {zero, zero, zero, zero};
  }
  static Codes load_codes(const uint8_t* p) {
    const auto* codes = reinterpret_cast<const int8_t*>(p);
    return {vld1q_s8(codes), vld1q_s8(codes + 16), vld1q_s8(codes + 32), vld1q_s8(codes + 48)};
  }
  static I16 dot_not_negative(I16 to, Codes codes, const int8_t* by) {
    int32_t four;
    __builtin_memcpy(&four, by, 4);
    const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
    return {dot4(to.a, codes.a, x), dot4(to.b, codes.b, x), dot4(to.c, codes.c, x), dot4(to.d, codes.d, x)};
  }
  static V16 to_float(I16 x) {
    return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)};
  }

  // ---- one lane per row
  static F4 zero4() { return vdupq_n_f32(0.0f); }
  static F4 set4(const float* p) { return vld1q_f32(p); }
  static void store4(float* p, F4 a) { vst1q_f32(p, a); }
  // Gathered in integer registers: vector units are the busier ones.
  static F4 halves4(const uint8_t* const* p, int offset) {
    const auto half = [&](const uint8_t* from) {
      uint16_t h;
      __builtin_memcpy(&h, from + offset, 2);
      return static_cast<uint64_t>(h);
    };
    const uint64_t four = half(p[0]) | half(p[1]) << 16 | half(p[2]) << 32 | half(p[3]) << 48;
    return vcvt_f32_f16(vreinterpret_f16_u64(vcreate_u64(four)));
  }
  // 2^(e - 127) of four e8m0 bytes; 0 is 2^-127, a subnormal. 255, a NaN, becomes infinity.
  // The upper halves of the floats are made in integer registers.
  static F4 e8m0_4(const uint8_t* const* p) {
    const uint64_t upper = static_cast<uint64_t>(*p[0]) << 7 | static_cast<uint64_t>(*p[1]) << 23 |
                           static_cast<uint64_t>(*p[2]) << 39 | static_cast<uint64_t>(*p[3]) << 55;
    return vreinterpretq_f32_u32(vshll_n_u16(vmax_u16(vcreate_u16(upper), vdup_n_u16(0x0040)), 16));
  }
  // d and m = -z d of four Q4_Z blocks: exact, for d has five bits and z seven. Widened by zip, which two
  // units do, and not by shifts or conversions: d is the upper half of a float; 0x4b00 above an integer makes
  // it 2^23 more, as a float.
  static void zero_points4(const uint8_t* const* p, F4& d, F4& m) {
    const auto word = [](const uint8_t* from) {
      uint16_t h;
      __builtin_memcpy(&h, from, 2);
      return static_cast<uint64_t>(h);
    };
    const uint16x8_t dz = vcombine_u16(
        vcreate_u16(word(p[0]) | word(p[1]) << 16 | word(p[2]) << 32 | word(p[3]) << 48), vdup_n_u16(0));
    const uint16x8_t scale = vaddq_u16(vandq_u16(vshrq_n_u16(dz, 4), vdupq_n_u16(0x0ff8)),
                                       vdupq_n_u16(static_cast<uint16_t>(quant::kQ4ZScaleBias >> 16)));
    d = vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), scale));
    const uint16x8_t zero = vandq_u16(dz, vdupq_n_u16(127));
    const F4 eighths = vreinterpretq_f32_u16(vzip1q_u16(zero, vdupq_n_u16(0x4b00)));
    m = vmulq_f32(d, vmulq_n_f32(vsubq_f32(eighths, vdupq_n_f32(0x1p23f)), -0.125f));
  }
  // Four rows of four words to four words of four rows.
  struct Words4 {
    uint32x4_t word[4];
  };
  static Words4 transpose(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
    const uint32x4_t ac = vzip1q_u32(a, c), ac2 = vzip2q_u32(a, c), bd = vzip1q_u32(b, d),
                     bd2 = vzip2q_u32(b, d);
    return {{vzip1q_u32(ac, bd), vzip2q_u32(ac, bd), vzip1q_u32(ac2, bd2), vzip2q_u32(ac2, bd2)}};
  }
  static Words4 load_words4(const uint8_t* const* p, int offset) {
    const auto load = [&](const uint8_t* from) { return vreinterpretq_u32_u8(vld1q_u8(from + offset)); };
    return transpose(load(p[0]), load(p[1]), load(p[2]), load(p[3]));
  }
  // tbl indices that leave byte kByte of each word, above it zeros.
  template <int kByte>
  static uint8x16_t pick_byte() {
    return vreinterpretq_u8_u32(
        uint32x4_t{0xffffff00u + kByte, 0xffffff04u + kByte, 0xffffff08u + kByte, 0xffffff0cu + kByte});
  }
  template <int kByte>
  static F4 byte_times(uint32x4_t words, F4 by) {
    const uint32x4_t one = vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(words), pick_byte<kByte>()));
    return vmulq_f32(vcvtq_f32_u32(one), by);
  }
  static void bytes_times(uint32x4_t words, F4 by, float (*out)[4]) {
    vst1q_f32(out[0], byte_times<0>(words, by));
    vst1q_f32(out[1], byte_times<1>(words, by));
    vst1q_f32(out[2], byte_times<2>(words, by));
    vst1q_f32(out[3], byte_times<3>(words, by));
  }
  // The first 16 bytes of Q4_K and Q5_K: d, dmin, then three words of 6-bit scales and minimums
  // (matmul/formats.h, KScales).
  static void unpack_k_scales(const uint8_t* const* p, float (*scale)[4], float (*min)[4]) {
    const Words4 w = load_words4(p, 0);
    const F4 d = vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(w.word[0])));
    const F4 negative = vnegq_f32(vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32(w.word[0], 16))));
    const uint32x4_t six = vdupq_n_u32(0x3f3f3f3fu), four = vdupq_n_u32(0x0f0f0f0fu),
                     high = vdupq_n_u32(0x30303030u);
    bytes_times(vandq_u32(w.word[1], six), d, scale);
    bytes_times(vandq_u32(w.word[2], six), negative, min);
    const uint32x4_t s = vandq_u32(w.word[3], four), m = vandq_u32(vshrq_n_u32(w.word[3], 4), four);
    bytes_times(vorrq_u32(s, vandq_u32(vshrq_n_u32(w.word[1], 2), high)), d, scale + 4);
    bytes_times(vorrq_u32(m, vandq_u32(vshrq_n_u32(w.word[2], 2), high)), negative, min + 4);
  }
  // Sixteen int8 at p[r] + offset of four rows to int32 [16][4].
  template <class Out>
  static void transpose_bytes16(const uint8_t* const* p, int offset, Out out) {
    const Words4 w = load_words4(p, offset);
    unroll<4>([&](auto i) {
      const int32x4_t words = vreinterpretq_s32_u32(w.word[i]);
      vst1q_s32(out(4 * i), vshrq_n_s32(vshlq_n_s32(words, 24), 24));
      vst1q_s32(out(4 * i + 1), vshrq_n_s32(vshlq_n_s32(words, 16), 24));
      vst1q_s32(out(4 * i + 2), vshrq_n_s32(vshlq_n_s32(words, 8), 24));
      vst1q_s32(out(4 * i + 3), vshrq_n_s32(words, 24));
    });
  }
  static F4 mul4(F4 a, float b) { return vmulq_n_f32(a, b); }
  static F4 mul4(F4 a, F4 b) { return R::mul(a, b); }
  static F4 fma4(F4 a, F4 b, F4 c) { return R::fma(a, b, c); }
  static F4 fma4(F4 a, float b, F4 c) { return vfmaq_n_f32(c, a, b); }
  static F4 to_float4(I4 a) { return vcvtq_f32_s32(a); }
  static I4 sub4(I4 a, int32_t b) { return vsubq_s32(a, vdupq_n_s32(b)); }

  // ---- 32 codes
  static I8x32 load_i8(const int8_t* p) { return {vld1q_s8(p), vld1q_s8(p + 16)}; }
  // Bytes 0..15: low nibbles are elements 0..15, high nibbles 16..31.
  static I8x32 load_nibbles(const uint8_t* p) {
    const uint8x16_t v = vld1q_u8(p);
    return {vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(v, 4))};
  }
  // 32 bytes: the low (shift 0) or high (shift 4) nibble of each.
  template <int kShift>
  static I8x32 load_nibble_run(const uint8_t* p) {
    const uint8x16_t a = vld1q_u8(p), b = vld1q_u8(p + 16);
    if constexpr (kShift == 0) {
      const uint8x16_t mask = vdupq_n_u8(15);
      return {vreinterpretq_s8_u8(vandq_u8(a, mask)), vreinterpretq_s8_u8(vandq_u8(b, mask))};
    } else {
      return {vreinterpretq_s8_u8(vshrq_n_u8(a, 4)), vreinterpretq_s8_u8(vshrq_n_u8(b, 4))};
    }
  }
  static int8x16_t fifth_bits(uint8x16_t bytes) {
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
    return vreinterpretq_s8_u8(vandq_u8(vtstq_u8(bytes, bit), vdupq_n_u8(16)));
  }
  // Sets bit 4 of element j where bit j of the 32-bit word at p is set.
  static I8x32 or_fifth_bits(I8x32 x, const uint8_t* p) {
    const uint8x16_t lo = vcombine_u8(vld1_dup_u8(p), vld1_dup_u8(p + 1));
    const uint8x16_t hi = vcombine_u8(vld1_dup_u8(p + 2), vld1_dup_u8(p + 3));
    return {vorrq_s8(x.lo, fifth_bits(lo)), vorrq_s8(x.hi, fifth_bits(hi))};
  }
  // Sets bits 4.. of element j from bits [shift, shift + bits) of byte j.
  template <int kBits>
  static I8x32 or_high_run(I8x32 x, const uint8_t* p, int shift) {
    const int8x16_t down = vdupq_n_s8(static_cast<int8_t>(-shift));
    const uint8x16_t mask = vdupq_n_u8((1 << kBits) - 1);
    const uint8x16_t a = vandq_u8(vshlq_u8(vld1q_u8(p), down), mask);
    const uint8x16_t b = vandq_u8(vshlq_u8(vld1q_u8(p + 16), down), mask);
    return {vorrq_s8(x.lo, vreinterpretq_s8_u8(vshlq_n_u8(a, 4))),
            vorrq_s8(x.hi, vreinterpretq_s8_u8(vshlq_n_u8(b, 4)))};
  }
  // Bits [shift, shift + bits) of byte j of 32 as bits kAt and on of element j.
  template <int kBits, int kAt>
  static I8x32 bits_run(const uint8_t* p, int shift) {
    const int8x16_t down = vdupq_n_s8(static_cast<int8_t>(-shift));
    const uint8x16_t mask = vdupq_n_u8((1 << kBits) - 1);
    const uint8x16_t a = vandq_u8(vshlq_u8(vld1q_u8(p), down), mask);
    const uint8x16_t b = vandq_u8(vshlq_u8(vld1q_u8(p + 16), down), mask);
    return {vreinterpretq_s8_u8(vshlq_n_u8(a, kAt)), vreinterpretq_s8_u8(vshlq_n_u8(b, kAt))};
  }
  static I8x32 or_i8(I8x32 a, I8x32 b) { return {vorrq_s8(a.lo, b.lo), vorrq_s8(a.hi, b.hi)}; }
  static I8x32 all_i8(int8_t x) { return {vdupq_n_s8(x), vdupq_n_s8(x)}; }
  static I8x32 sub_i8(I8x32 x, int8_t b) {
    return {vsubq_s8(x.lo, vdupq_n_s8(b)), vsubq_s8(x.hi, vdupq_n_s8(b))};
  }
  static I8x32 lookup(I8x32 x, const int8_t* table) {
    const int8x16_t t = vld1q_s8(table);
    return {vqtbl1q_s8(t, vreinterpretq_u8_s8(x.lo)), vqtbl1q_s8(t, vreinterpretq_u8_s8(x.hi))};
  }
  // Nibbles as loaded by load_nibbles to the order low, high, low, high ...
  static I8x32 interleave(I8x32 x) { return {vzip1q_s8(x.lo, x.hi), vzip2q_s8(x.lo, x.hi)}; }

#if defined(MILLRACE_HAS_DOTPROD)
  // Where a sum begins. Processors drop this instruction before it is issued; compilers would copy a zero
  // they keep in a register instead, and a copy takes a vector unit.
  static int32x4_t zero_sum() {
    int32x4_t zero;
    asm volatile("movi %0.4s, #0" : "=w"(zero));
    return zero;
  }
  static int32x4_t dot16(int8x16_t w, int8x16_t x) { return vdotq_s32(zero_sum(), w, x); }
  static int32x4_t dot4(int32x4_t to, int8x16_t w, int8x16_t x) { return vdotq_s32(to, w, x); }
  template <bool kUnsigned>
  static Partial dot(I8x32 w, I8x32 x) {
    return vdotq_s32(dot16(w.lo, x.lo), w.hi, x.hi);
  }
#else
  // Two products of at most 128 * 127 fit in 16 bits.
  static int32x4_t dot4(int32x4_t to, int8x16_t w, int8x16_t x) {
    const int16x8_t lo = vmull_s8(vget_low_s8(w), vget_low_s8(x)), hi = vmull_high_s8(w, x);
    return vpadalq_s16(to, vpaddq_s16(lo, hi));
  }
  static int32x4_t dot16(int8x16_t w, int8x16_t x) {
    return vpaddlq_s16(vmlal_high_s8(vmull_s8(vget_low_s8(w), vget_low_s8(x)), w, x));
  }
  template <bool kUnsigned>
  static Partial dot(I8x32 w, I8x32 x) {
    return vaddq_s32(dot16(w.lo, x.lo), dot16(w.hi, x.hi));
  }
#endif
  // Two halves of 16, each with an integer scale of its own.
  static Partial dot_halves(I8x32 w, I8x32 x, int32_t first, int32_t second) {
    return vmlaq_n_s32(vmulq_n_s32(dot16(w.lo, x.lo), first), dot16(w.hi, x.hi), second);
  }
  // The sums of four rows, one lane each.
  static I4 reduce(const Partial* p) { return vpaddq_s32(vpaddq_s32(p[0], p[1]), vpaddq_s32(p[2], p[3])); }
};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
