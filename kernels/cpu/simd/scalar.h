// The vector types in plain C++: Simd has 16 floats. Slow and obviously right; it is also what every other
// instruction set is compared with.
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/target.h"
#include "kernels/quant/blocks.h"
#if !defined(MILLRACE_SIMD_SCALAR)
#error "another target is defined: include kernels/cpu/simd/simd.h"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

template <int kN>
struct Floats {
  float v[kN];
};

// Operations on any number of lanes.
struct FloatOps {
  static float bits_to_float(uint32_t u) {
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
  }
  static uint32_t float_to_bits(float f) {
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    return u;
  }
  template <int kN, class Op>
  static Floats<kN> each(Op op) {
    Floats<kN> r;
    for (int j = 0; j < kN; ++j) r.v[j] = op(j);
    return r;
  }
  template <int kN>
  static Floats<kN> all(float x) {
    return each<kN>([=](int) { return x; });
  }
  // From memory of any alignment: a file need not align its tensors.
  template <int kN>
  static Floats<kN> load_floats(const float* p) {
    Floats<kN> r;
    __builtin_memcpy(r.v, p, sizeof r.v);
    return r;
  }
  template <int kN>
  static void store(float* p, Floats<kN> a) {
    for (int j = 0; j < kN; ++j) p[j] = a.v[j];
  }
  template <int kN>
  static Floats<kN> add(Floats<kN> a, Floats<kN> b) {
    return each<kN>([&](int j) { return a.v[j] + b.v[j]; });
  }
  template <int kN>
  static Floats<kN> sub(Floats<kN> a, Floats<kN> b) {
    return each<kN>([&](int j) { return a.v[j] - b.v[j]; });
  }
  template <int kN>
  static Floats<kN> mul(Floats<kN> a, Floats<kN> b) {
    return each<kN>([&](int j) { return a.v[j] * b.v[j]; });
  }
  template <int kN>
  static Floats<kN> div(Floats<kN> a, Floats<kN> b) {
    return each<kN>([&](int j) { return a.v[j] / b.v[j]; });
  }
  // A NaN in either operand survives.
  template <int kN>
  static Floats<kN> max(Floats<kN> a, Floats<kN> b) {
    return each<kN>([&](int j) { return a.v[j] > b.v[j] || a.v[j] != a.v[j] ? a.v[j] : b.v[j]; });
  }
  template <int kN>
  static Floats<kN> min(Floats<kN> a, Floats<kN> b) {
    return each<kN>([&](int j) { return a.v[j] < b.v[j] || a.v[j] != a.v[j] ? a.v[j] : b.v[j]; });
  }
  template <int kN>
  static Floats<kN> abs(Floats<kN> a) {
    return each<kN>([&](int j) { return __builtin_fabsf(a.v[j]); });
  }
  template <int kN>
  static Floats<kN> fma(Floats<kN> a, Floats<kN> b, Floats<kN> c) {
    return each<kN>([&](int j) { return __builtin_fmaf(a.v[j], b.v[j], c.v[j]); });
  }
};

struct Simd : FloatOps {
  static constexpr int kFloatTileRows = 2, kFloatTileM = 2;  // sixteen registers of four floats
  // Query rows that share loads in attention, and blocks taken at once: those of the widest table, so that
  // every machine tests them.
  static constexpr int kAttendRows = 8, kAttendAtOnce = 2;
  using V16 = Floats<16>;
  struct F4 {
    float v[4];
  };  // one lane per row of a tile
  struct I4 {
    int32_t v[4];
  };
  struct I8x32 {
    int8_t v[32];
  };
  using Partial = int32_t;  // a block's integer sum, not yet reduced

  static float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude >= 0x0400u) return bits_to_float(sign | ((magnitude << 13) + 0x38000000u));
    return bits_to_float(float_to_bits(static_cast<float>(magnitude) * 0x1p-24f) | sign);
  }

  // ---- 16 floats
  static V16 zero() { return broadcast(0.0f); }
  static V16 broadcast(float x) { return all<16>(x); }
  static V16 load(const float* p) { return load_floats<16>(p); }
  static V16 load_f16(const uint16_t* p) {
    uint16_t h[16];
    __builtin_memcpy(h, p, 32);
    return each<16>([&](int j) { return half_to_float(h[j]); });
  }
  static V16 load_bf16(const uint16_t* p) {
    uint16_t h[16];
    __builtin_memcpy(h, p, 32);
    return each<16>([&](int j) { return bits_to_float(static_cast<uint32_t>(h[j]) << 16); });
  }
  // Rounded to nearest even; a NaN stays one.
  static uint16_t float_to_half(float x) {
    const uint32_t u = float_to_bits(x), magnitude = u & 0x7fffffffu;
    const auto sign = static_cast<uint16_t>(u >> 16 & 0x8000u);
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {  // adding 0.5 aligns the last kept bit, and the addition rounds
      return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13);
  }
  static void store_f16(uint16_t* p, V16 x) {
    for (int j = 0; j < 16; ++j) p[j] = float_to_half(x.v[j]);
  }
  static void store_bf16(uint16_t* p, V16 x) {
    for (int j = 0; j < 16; ++j) {
      const uint32_t u = float_to_bits(x.v[j]);
      const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
      p[j] = static_cast<uint16_t>(nan ? u >> 16 | 0x40u : (u + 0x7fffu + (u >> 16 & 1u)) >> 16);
    }
  }
  // a < b ? x : y
  static V16 select_less(V16 a, V16 b, V16 x, V16 y) {
    return each<16>([&](int j) { return a.v[j] < b.v[j] ? x.v[j] : y.v[j]; });
  }
  // The larger or smaller of x and a bound, which is not zero and no NaN.
  static V16 at_least(V16 x, V16 y) { return max(x, y); }
  static V16 at_most(V16 x, V16 y) { return min(x, y); }
  // The larger one, where any result does of a NaN; the larger of x, which is not negative, and |y|, of which
  // a NaN survives.
  static V16 larger(V16 x, V16 y) { return max(x, y); }
  static V16 larger_size(V16 x, V16 y) {
    return each<16>([&](int j) {
      const float size = __builtin_fabsf(y.v[j]);
      return x.v[j] > size || x.v[j] != x.v[j] ? x.v[j] : size;
    });
  }
  // a < b ? 0 : y
  static V16 zero_if_less(V16 a, V16 b, V16 y) {
    return each<16>([&](int j) { return a.v[j] < b.v[j] ? 0.0f : y.v[j]; });
  }
  // a * 2^n where the low bits of `magic` hold n: adds them to a's exponent.
  static V16 add_exponent(V16 a, V16 magic) {
    return each<16>(
        [&](int j) { return bits_to_float(float_to_bits(a.v[j]) + (float_to_bits(magic.v[j]) << 23)); });
  }
  static float reduce_sum(V16 a) {
    float s[8];
    for (int j = 0; j < 8; ++j) s[j] = a.v[j] + a.v[j + 8];
    for (int j = 0; j < 4; ++j) s[j] += s[j + 4];
    return (s[0] + s[2]) + (s[1] + s[3]);
  }
  static float reduce_max(V16 a) {
    float m = a.v[0];
    for (int j = 1; j < 16; ++j) m = a.v[j] > m || a.v[j] != a.v[j] ? a.v[j] : m;
    return m;
  }
  // 16 floats of magnitude at most 127 to int8, to nearest even; returns their sum.
  static int32_t round_to_int8(V16 a, int8_t* out) {
    int32_t total = 0;
    for (int j = 0; j < 16; ++j) {
      // Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
      const auto q = static_cast<int8_t>(float_to_bits(a.v[j] + 12582912.0f) & 0xffu);
      out[j] = q;
      total += q;
    }
    return total;
  }

  // The low byte of each float's bits.
  static void store_low_bytes(V16 a, int8_t* out) {
    for (int j = 0; j < 16; ++j) out[j] = static_cast<int8_t>(float_to_bits(a.v[j]) & 0xffu);
  }

  // ---- 16 sums of products of int8, four at a time: `to` += of lane j the codes 4 j .. 4 j + 3 times `by`
  struct I16 {
    int32_t v[16];
  };
  struct Codes {
    int8_t v[64];
  };
  using Keys = Codes;
  static I16 begin_keys(int32_t) { return zero_sums(); }
  static Keys load_keys(const uint8_t* p) { return load_codes(p); }
  static I16 dot_keys(I16 to, Keys keys, const int8_t* by) { return dot_not_negative(to, keys, by); }
  static I16 zero_sums() { return {}; }
  static Codes load_codes(const uint8_t* p) {
    Codes r;
    __builtin_memcpy(r.v, p, 64);
    return r;
  }
  static I16 dot_not_negative(I16 to, Codes codes, const int8_t* by) {
    for (int j = 0; j < 16; ++j) {
      for (int i = 0; i < 4; ++i) to.v[j] += codes.v[4 * j + i] * by[i];
    }
    return to;
  }
  static V16 to_float(I16 x) {
    return each<16>([&](int j) { return static_cast<float>(x.v[j]); });
  }

  // ---- one lane per row
  static F4 zero4() { return {{0, 0, 0, 0}}; }
  static F4 set4(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static void store4(float* p, F4 a) {
    for (int j = 0; j < 4; ++j) p[j] = a.v[j];
  }
  static F4 halves4(const uint8_t* const* p, int offset) {
    F4 r;
    for (int j = 0; j < 4; ++j) {
      uint16_t h;
      __builtin_memcpy(&h, p[j] + offset, 2);
      r.v[j] = half_to_float(h);
    }
    return r;
  }
  // 2^(e - 127) of four e8m0 bytes; 0 is 2^-127, a subnormal. 255, a NaN, becomes infinity.
  static F4 e8m0_4(const uint8_t* const* p) {
    F4 r;
    for (int j = 0; j < 4; ++j) {
      const uint32_t bits = static_cast<uint32_t>(*p[j]) << 23;
      r.v[j] = bits_to_float(bits > 0x00400000u ? bits : 0x00400000u);
    }
    return r;
  }
  // d and m = -z d of four Q4_Z blocks: exact, for d has five bits and z seven.
  static void zero_points4(const uint8_t* const* p, F4& d, F4& m) {
    for (int j = 0; j < 4; ++j) {
      uint16_t dz;
      __builtin_memcpy(&dz, p[j], 2);
      d.v[j] = bits_to_float(quant::q4_z_scale_bits(dz));
      m.v[j] = d.v[j] * quant::q4_z_min(dz);
    }
  }
  static F4 mul4(F4 a, float b) {
    for (float& x : a.v) x *= b;
    return a;
  }
  static F4 mul4(F4 a, F4 b) {
    for (int j = 0; j < 4; ++j) a.v[j] *= b.v[j];
    return a;
  }
  static F4 fma4(F4 a, F4 b, F4 c) {
    for (int j = 0; j < 4; ++j) c.v[j] = __builtin_fmaf(a.v[j], b.v[j], c.v[j]);
    return c;
  }
  static F4 fma4(F4 a, float b, F4 c) {
    for (int j = 0; j < 4; ++j) c.v[j] = __builtin_fmaf(a.v[j], b, c.v[j]);
    return c;
  }
  static F4 to_float4(I4 a) {
    F4 r;
    for (int j = 0; j < 4; ++j) r.v[j] = static_cast<float>(a.v[j]);
    return r;
  }
  static I4 sub4(I4 a, int32_t b) {
    for (int32_t& x : a.v) x -= b;
    return a;
  }

  // ---- 32 codes
  static I8x32 load_i8(const int8_t* p) {
    I8x32 r;
    __builtin_memcpy(r.v, p, 32);
    return r;
  }
  // Bytes 0..15: low nibbles are elements 0..15, high nibbles 16..31.
  static I8x32 load_nibbles(const uint8_t* p) {
    I8x32 r;
    for (int j = 0; j < 16; ++j) {
      r.v[j] = p[j] & 15;
      r.v[j + 16] = static_cast<int8_t>(p[j] >> 4);
    }
    return r;
  }
  // 32 bytes: the low (shift 0) or high (shift 4) nibble of each.
  template <int kShift>
  static I8x32 load_nibble_run(const uint8_t* p) {
    I8x32 r;
    for (int j = 0; j < 32; ++j) r.v[j] = (p[j] >> kShift) & 15;
    return r;
  }
  // Sets bit 4 of element j where bit j of the 32-bit word at p is set.
  static I8x32 or_fifth_bits(I8x32 a, const uint8_t* p) {
    for (int j = 0; j < 32; ++j) a.v[j] = static_cast<int8_t>(a.v[j] | ((p[j / 8] >> (j % 8)) & 1) << 4);
    return a;
  }
  // Sets bits 4.. of element j from bits [shift, shift + bits) of byte j.
  template <int kBits>
  static I8x32 or_high_run(I8x32 a, const uint8_t* p, int shift) {
    for (int j = 0; j < 32; ++j) {
      a.v[j] = static_cast<int8_t>(a.v[j] | ((p[j] >> shift) & ((1 << kBits) - 1)) << 4);
    }
    return a;
  }
  // Bits [shift, shift + bits) of byte j of 32 as bits kAt and on of element j.
  template <int kBits, int kAt>
  static I8x32 bits_run(const uint8_t* p, int shift) {
    I8x32 r;
    for (int j = 0; j < 32; ++j) r.v[j] = static_cast<int8_t>(((p[j] >> shift) & ((1 << kBits) - 1)) << kAt);
    return r;
  }
  static I8x32 or_i8(I8x32 a, I8x32 b) {
    for (int j = 0; j < 32; ++j) a.v[j] = static_cast<int8_t>(a.v[j] | b.v[j]);
    return a;
  }
  static I8x32 all_i8(int8_t x) {
    I8x32 r;
    for (int8_t& v : r.v) v = x;
    return r;
  }
  static I8x32 sub_i8(I8x32 a, int8_t b) {
    for (int8_t& x : a.v) x = static_cast<int8_t>(x - b);
    return a;
  }
  static I8x32 lookup(I8x32 a, const int8_t* table) {
    for (int8_t& x : a.v) x = table[x];
    return a;
  }
  // Nibbles as loaded by load_nibbles to the order low, high, low, high ...
  static I8x32 interleave(I8x32 a) {
    I8x32 r;
    for (int j = 0; j < 16; ++j) {
      r.v[2 * j] = a.v[j];
      r.v[2 * j + 1] = a.v[j + 16];
    }
    return r;
  }
  // kUnsigned: w is not negative.
  template <bool kUnsigned>
  static Partial dot(I8x32 w, I8x32 x) {
    int32_t s = 0;
    for (int j = 0; j < 32; ++j) s += w.v[j] * x.v[j];
    return s;
  }
  // Two halves of 16, each with an integer scale of its own.
  static Partial dot_halves(I8x32 w, I8x32 x, int32_t first, int32_t second) {
    int32_t a = 0, b = 0;
    for (int j = 0; j < 16; ++j) {
      a += w.v[j] * x.v[j];
      b += w.v[j + 16] * x.v[j + 16];
    }
    return a * first + b * second;
  }
  static I4 reduce(const Partial* p) { return {{p[0], p[1], p[2], p[3]}}; }
};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
