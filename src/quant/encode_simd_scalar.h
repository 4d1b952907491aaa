// The lanes of the encoders in plain C++: what the vector forms are held to. Included inside the anonymous
// namespace of encode_scalar.cpp.
//
// A group is kBlocks blocks. V has one float per block, or, as a "part", four neighbouring elements of
// kBlocks / 4 of them: part p of a group holds those of blocks p, p + 4, ... So four parts hold the elements
// 4t .. 4t + 3 of every block, a sum over a part's elements is a sum of neighbours, and Bytes holds the four
// parts' elements, block after block.
#pragma once

struct Simd {
  static constexpr int kBlocks = 4;
  struct V {
    float v[4];
  };
  struct Mask {
    bool v[4];
  };
  struct Ints {
    int32_t v[4];
  };
  struct Bytes {
    uint8_t v[16];
  };
  template <class F>
  static V each(F&& f) {
    V out;
    for (int i = 0; i < 4; ++i) out.v[i] = f(i);
    return out;
  }

  static V all(float x) { return {{x, x, x, x}}; }
  static V load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static void store(float* p, V x) { std::memcpy(p, x.v, sizeof x.v); }
  static V add(V a, V b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
  }
  static V sub(V a, V b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
  }
  static V mul(V a, V b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
  }
  static V div(V a, V b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
  }
  static V fma(V a, V b, V c) {
    return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
  }
  static V min(V a, V b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static V max(V a, V b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static V abs(V a) {
    return each([&](int i) { return std::fabs(a.v[i]); });
  }
  // To the nearest integer, ties to even.
  static V round(V a) {
    return each([&](int i) { return std::nearbyint(a.v[i]); });
  }
  static Mask greater(V a, V b) {
    Mask out;
    for (int i = 0; i < 4; ++i) out.v[i] = a.v[i] > b.v[i];
    return out;
  }
  static bool any(Mask m) { return m.v[0] || m.v[1] || m.v[2] || m.v[3]; }
  static V select(Mask m, V a, V b) {
    return each([&](int i) { return m.v[i] ? a.v[i] : b.v[i]; });
  }

  // Elements 4t .. 4t + 3 of part p's blocks, which lie `stride` apart; and a block's number four times.
  static V load_part(const float* x, int stride, int t, int p) { return load(x + p * stride + 4 * t); }
  template <int kPart>
  static V spread(V x) {
    return all(x.v[kPart]);
  }
  // Over the elements of each block: four parts to one number per block.
  static V add_across(const V* p) {
    return each([&](int i) { return (p[i].v[0] + p[i].v[1]) + (p[i].v[2] + p[i].v[3]); });
  }
  static V max_across(const V* p) {
    return each([&](int i) { return larger(larger(p[i].v[0], p[i].v[1]), larger(p[i].v[2], p[i].v[3])); });
  }
  static V min_across(const V* p) {
    return each([&](int i) { return smaller(smaller(p[i].v[0], p[i].v[1]), smaller(p[i].v[2], p[i].v[3])); });
  }
  static float smaller(float a, float b) { return a < b ? a : b; }
  static float larger(float a, float b) { return a > b ? a : b; }

  // ---- bytes: four parts rounded to integers, saturated
  static int32_t nearest(float x, int32_t low, int32_t high) {
    const float least = static_cast<float>(low), most = static_cast<float>(high);
    return static_cast<int32_t>(std::nearbyint(x < least ? least : x > most ? most : x));
  }
  static Bytes to_unsigned(const V* p) {
    Bytes out;
    for (int i = 0; i < 16; ++i) out.v[i] = static_cast<uint8_t>(nearest(p[i / 4].v[i % 4], 0, 255));
    return out;
  }
  static Bytes to_signed(const V* p) {
    Bytes out;
    for (int i = 0; i < 16; ++i) out.v[i] = static_cast<uint8_t>(nearest(p[i / 4].v[i % 4], -128, 127));
    return out;
  }
  // No less than 0.
  template <int kOffset>
  static Bytes minus(Bytes x) {
    for (uint8_t& v : x.v) v = static_cast<uint8_t>(v > kOffset ? v - kOffset : 0);
    return x;
  }
  // (x m + 2^(kShift - 1)) >> kShift, at most `top`.
  template <int kShift>
  static Bytes unsigned_codes(Bytes x, int m, int top) {
    for (uint8_t& v : x.v) v = static_cast<uint8_t>(std::min((v * m + (1 << (kShift - 1))) >> kShift, top));
    return x;
  }
  // The same for signed bytes, in [-half, half - 1].
  template <int kShift>
  static Bytes signed_codes(Bytes x, int m, int half) {
    for (uint8_t& v : x.v) {
      const int q = (static_cast<int8_t>(v) * m + (1 << (kShift - 1))) >> kShift;
      v = static_cast<uint8_t>(std::clamp(q, -half, half - 1));
    }
    return x;
  }
  static Ints zero_ints() { return {}; }
  // sum + a . b over each block's four; b below 128 in the unsigned one. And sum + the sum of a.
  static Ints dot_unsigned(Ints sum, Bytes a, Bytes b) {
    for (int i = 0; i < 16; ++i) sum.v[i / 4] += a.v[i] * b.v[i];
    return sum;
  }
  static Ints dot_signed(Ints sum, Bytes a, Bytes b) {
    for (int i = 0; i < 16; ++i) sum.v[i / 4] += static_cast<int8_t>(a.v[i]) * static_cast<int8_t>(b.v[i]);
    return sum;
  }
  static Ints add_bytes(Ints sum, Bytes a) {
    for (int i = 0; i < 16; ++i) sum.v[i / 4] += a.v[i];
    return sum;
  }
  static V to_float(Ints x) {
    return each([&](int i) { return static_cast<float>(x.v[i]); });
  }

  // How many of limits[0 .. 6] each byte reaches: c. The sum of (byte - values[c])^2.
  static Ints add_misses(Ints sum, Bytes x, const uint8_t* limits, const uint8_t* values) {
    for (int i = 0; i < 16; ++i) {
      int code = 0;
      for (int k = 0; k < 7; ++k) code += x.v[i] >= limits[k] ? 1 : 0;
      const int off = x.v[i] - values[code];
      sum.v[i / 4] += off * off;
    }
    return sum;
  }

  // Bytes [4] of elements 16 h .. 16 h + 15: block b's sixteen to out + b * stride.
  static void store_codes(const Bytes* quads, uint8_t* out, int stride) {
    for (int b = 0; b < 4; ++b) {
      for (int t = 0; t < 4; ++t) std::memcpy(out + b * stride + 4 * t, quads[t].v + 4 * b, 4);
    }
  }

  // ---- sixteen-bit floats: four (or kBlocks) values that a half holds without overflow
  static void store_halves(uint16_t* out, V x) {
    for (int i = 0; i < 4; ++i) out[i] = to_half(x.v[i]).bits;
  }
  static V load_halves(const uint16_t* p) {
    return each([&](int i) { return millrace::to_float(Half{p[i]}); });
  }
};
