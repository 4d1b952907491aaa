// The lanes of the quantizers in plain C++: what the vector forms are held to.
//
// A group is kBlocks blocks. V has one float per block, or, as a "part", four neighbouring elements of
// kBlocks / 4 of them: part p of a group holds those of blocks p, p + 4, ... So four parts hold the elements
// 4t .. 4t + 3 of every block, a sum over a part's elements is a sum of neighbours, and Bytes holds the four
// parts' elements, block after block.
#pragma once

#include "base/float_bits.h"
#include "kernels/cpu/simd/scalar.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

struct Lanes : FloatOps {
  using FloatOps::abs, FloatOps::fma;  // besides those of words
  static constexpr int kBlocks = 4;
  using V = Floats<4>;
  struct Mask {
    bool v[4];
  };
  struct Ints {
    int32_t v[4];
  };
  struct Bytes {
    uint8_t v[16];
  };
  struct Words {
    int16_t v[16];
  };
  static V all(float x) { return FloatOps::all<4>(x); }
  static V load(const float* p) { return load_floats<4>(p); }
  // To the nearest integer, ties to even.
  static V round(V a) {
    return each<4>([&](int i) { return __builtin_nearbyintf(a.v[i]); });
  }
  static Mask greater(V a, V b) {
    Mask out;
    for (int i = 0; i < 4; ++i) out.v[i] = a.v[i] > b.v[i];
    return out;
  }
  static bool any(Mask m) { return m.v[0] || m.v[1] || m.v[2] || m.v[3]; }
  static V select(Mask m, V a, V b) {
    return each<4>([&](int i) { return m.v[i] ? a.v[i] : b.v[i]; });
  }

  // Elements 4t .. 4t + 3 of part p's blocks, which lie `stride` apart; and a block's number four times.
  static V load_part(const float* x, int stride, int t, int p) { return load(x + p * stride + 4 * t); }
  template <int kPart>
  static V spread(V x) {
    return all(x.v[kPart]);
  }
  // Over the elements of each block: four parts to one number per block.
  static V add_across(const V* p) {
    return each<4>([&](int i) { return (p[i].v[0] + p[i].v[1]) + (p[i].v[2] + p[i].v[3]); });
  }
  static V max_across(const V* p) {
    return each<4>([&](int i) { return larger(larger(p[i].v[0], p[i].v[1]), larger(p[i].v[2], p[i].v[3])); });
  }
  static V min_across(const V* p) {
    return each<4>(
        [&](int i) { return smaller(smaller(p[i].v[0], p[i].v[1]), smaller(p[i].v[2], p[i].v[3])); });
  }
  static float smaller(float a, float b) { return a < b ? a : b; }
  static float larger(float a, float b) { return a > b ? a : b; }

  // ---- bytes. A float of kMagic + n has the integer n in its lower bits: rounding is an addition, and what
  // is taken of the bits needs no conversion.
  template <class F>
  static Words each_word(F&& f) {
    Words out;
    for (int i = 0; i < 16; ++i) out.v[i] = static_cast<int16_t>(f(i));
    return out;
  }
  static Words all_words(int x) {
    return each_word([&](int) { return x; });
  }
  // The lower sixteen bits of each n.
  static Words words(const V* p) {
    return each_word([&](int i) { return static_cast<int16_t>(float_to_bits(p[i / 4].v[i % 4])); });
  }
  static Bytes high_bytes(Words x) {
    return each_byte([&](int i) { return static_cast<uint8_t>(x.v[i] >> 8); });
  }
  static Bytes low_bytes(Words x) {
    return each_byte([&](int i) { return static_cast<uint8_t>(x.v[i]); });
  }
  // x = 256 high + low + 128, both signed.
  static void split(Words x, Bytes& high, Bytes& low) {
    high = high_bytes(x);
    low = each_byte([&](int i) { return static_cast<uint8_t>(x.v[i] ^ 0x80); });
  }
  static int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }
  static int saturated_word(int x) { return clamp(x, -32768, 32767); }
  static Words add_saturated(Words a, Words b) {
    return each_word([&](int i) { return saturated_word(a.v[i] + b.v[i]); });
  }
  static Words sub_saturated(Words a, Words b) {
    return each_word([&](int i) { return saturated_word(a.v[i] - b.v[i]); });
  }
  // Over 2^kShift, to the nearest, ties up.
  template <int kShift>
  static Words round_shift(Words x) {
    return each_word([&](int i) { return (x.v[i] + (1 << (kShift - 1))) >> kShift; });
  }
  // plus + x * by / 2^15, to the nearest (ties up), saturated; not for -32768 squared.
  static Words fma(Words x, Words by, Words plus) {
    return each_word([&](int i) { return saturated_word(plus.v[i] + ((x.v[i] * by.v[i] + 0x4000) >> 15)); });
  }
  static Words abs(Words x) {  // above -32768
    return each_word([&](int i) { return x.v[i] < 0 ? -x.v[i] : x.v[i]; });
  }
  static int at(Bytes x, int i) { return static_cast<int8_t>(x.v[i]); }
  static uint8_t saturated(int x) { return static_cast<uint8_t>(clamp(x, -128, 127)); }
  template <class F>
  static Bytes each_byte(F&& f) {
    Bytes out;
    for (int i = 0; i < 16; ++i) out.v[i] = f(i);
    return out;
  }
  static Bytes all_bytes(int x) {
    return each_byte([&](int) { return static_cast<uint8_t>(x); });
  }
  static Bytes add_saturated(Bytes a, Bytes b) {
    return each_byte([&](int i) { return saturated(at(a, i) + at(b, i)); });
  }
  static Bytes sub_saturated(Bytes a, Bytes b) {
    return each_byte([&](int i) { return saturated(at(a, i) - at(b, i)); });
  }
  // Signed bytes over 2^kShift, rounded down; and to the nearest, ties up.
  template <int kShift>
  static Bytes shift(Bytes x) {
    return each_byte([&](int i) { return static_cast<uint8_t>(at(x, i) >> kShift); });
  }
  template <int kShift>
  static Bytes round_shift(Bytes x) {
    return each_byte([&](int i) { return static_cast<uint8_t>((at(x, i) + (1 << (kShift - 1))) >> kShift); });
  }
  static Ints zero_ints() { return {}; }
  // sum + a . b over each block's four; b above -128, and a product below 2^14 either way. And sum + a . a
  // for any a; and sum + the sum of a. What becomes a float stays below 2^22 either way.
  static Ints dot_signed(Ints sum, Bytes a, Bytes b) {
    for (int i = 0; i < 16; ++i) sum.v[i / 4] += at(a, i) * at(b, i);
    return sum;
  }
  static Ints add_squares(Ints sum, Bytes a) { return dot_signed(sum, a, a); }
  static Ints sum_signed(Ints sum, Bytes a) {
    for (int i = 0; i < 16; ++i) sum.v[i / 4] += at(a, i);
    return sum;
  }
  static V to_float(Ints x) {
    return each<4>([&](int i) { return static_cast<float>(x.v[i]); });
  }
  // 256 high + low
  static V to_float(Ints high, Ints low) {
    return each<4>([&](int i) { return static_cast<float>(256 * high.v[i] + low.v[i]); });
  }

  // low + 16 high, of codes below 16.
  static Bytes nibbles(Bytes low, Bytes high) {
    return each_byte([&](int i) { return static_cast<uint8_t>(low.v[i] | high.v[i] << 4); });
  }
  static Bytes and_bytes(Bytes x, int mask) {
    return each_byte([&](int i) { return static_cast<uint8_t>(x.v[i] & mask); });
  }
  static Bytes or_bytes(Bytes a, Bytes b) {
    return each_byte([&](int i) { return static_cast<uint8_t>(a.v[i] | b.v[i]); });
  }

  // ---- MXFP4
  // sum + the sum of (x - level)^2, of unsigned bytes.
  static Ints add_misses(Ints sum, Bytes x, Bytes level) {
    for (int i = 0; i < 16; ++i) sum.v[i / 4] += (x.v[i] - level.v[i]) * (x.v[i] - level.v[i]);
    return sum;
  }
  // table[x >> kShift], of 32 bytes; for unsigned x below 32 << kShift.
  template <int kShift>
  static Bytes look_up(const uint8_t* table, Bytes x) {
    return each_byte([&](int i) { return table[x.v[i] >> kShift]; });
  }
  static Bytes min_bytes(Bytes a, Bytes b) {
    return each_byte([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  // Unsigned x over 2^by, for each by of 1 to 3.
  static Bytes shift_down(Bytes x, Bytes by) {
    return each_byte([&](int i) { return static_cast<uint8_t>(x.v[i] >> by.v[i]); });
  }
  // sum + a . b over each block's four, unsigned, b at most 24.
  static Ints dot_small(Ints sum, Bytes a, Bytes b) {
    for (int i = 0; i < 16; ++i) sum.v[i / 4] += a.v[i] * b.v[i];
    return sum;
  }
  // 8 more where the sign is minus, of codes below 8.
  static Bytes with_signs(Bytes codes, Bytes signs) {
    return each_byte([&](int i) { return static_cast<uint8_t>(codes.v[i] | (signs.v[i] & 0x80) >> 4); });
  }
  // The largest power of two in each x above 0.
  static V power_of(V x) {
    return each<4>([&](int i) { return bits_to_float(float_to_bits(x.v[i]) & 0x7f800000u); });
  }

  // Bytes [4] of elements 16 h .. 16 h + 15: block b's sixteen to out + b * stride.
  static void store_codes(const Bytes* quads, uint8_t* out, int stride) {
    for (int b = 0; b < 4; ++b) {
      for (int t = 0; t < 4; ++t) __builtin_memcpy(out + b * stride + 4 * t, quads[t].v + 4 * b, 4);
    }
  }

  // ---- sixteen-bit floats: four (or kBlocks) values that a half holds without overflow
  static void store_halves(uint16_t* out, V x) {
    for (int i = 0; i < 4; ++i) out[i] = to_half(x.v[i]).bits;
  }
  static V load_halves(const uint16_t* p) {
    return each<4>([&](int i) { return millrace::to_float(Half{p[i]}); });
  }
};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
