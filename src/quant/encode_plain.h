// Encoders of single values and of blocks of 32, a group of blocks at a time. Included inside the anonymous
// namespace of the encoders' tables, after encode_search.h.
//
// Million values per second of a Neoverse-N1 core, measured (docs/benchmarks.md): f16 1,388, bf16 953, q8_0
// 888, q4_1 293, q4_0 234, mxfp4 229. All of them are bound by its two vector units, none by memory.
#pragma once

constexpr float kMostHalf = 65504.0f;

// Sums of squares of misses and of values, a lane for every element of a part.
struct Misses {
  V error = Simd::all(0.0f), total = Simd::all(0.0f);
  void add(V off, V value) {
    error = Simd::fma(off, off, error);
    total = Simd::fma(value, value, total);
  }
  EncodeSums sums() const {
    float errors[Simd::kBlocks], totals[Simd::kBlocks];
    Simd::store(errors, error);
    Simd::store(totals, total);
    EncodeSums out;
    for (int i = 0; i < Simd::kBlocks; ++i) {
      out.error += errors[i];
      out.total += totals[i];
    }
    return out;
  }
};

// A number of each block as the f16 that is stored, always finite and never -0, and what it then is.
struct StoredHalves {
  uint16_t bits[Simd::kBlocks];
  V value;
  explicit StoredHalves(V wanted) {
    const V held = Simd::max(Simd::min(wanted, Simd::all(kMostHalf)), Simd::all(-kMostHalf));
    Simd::store_halves(bits, Simd::add(held, Simd::all(0.0f)));
    value = Simd::load_halves(bits);
  }
};

// Codes of a group, block after block.
struct Codes {
  uint8_t all[Simd::kBlocks * kBlock];
  const uint8_t* of(int block) const { return all + block * kBlock; }
};

inline void pack_nibbles(const uint8_t* codes, uint8_t* q) {
  for (int j = 0; j < 16; ++j) q[j] = static_cast<uint8_t>((codes[j] & 15) | (codes[j + 16] << 4));
}

// Four bytes' fifth bits side by side: the product brings bit 8 i + 4 to bit 28 + i.
inline void pack_fifth_bits(const uint8_t* codes, uint8_t* high) {
  for (int j = 0; j < 4; ++j) {
    uint32_t words[2];
    std::memcpy(words, codes + 8 * j, sizeof words);
    const auto four = [](uint32_t w) { return ((w >> 4 & 0x01010101u) * 0x01020408u) >> 24 & 15u; };
    high[j] = static_cast<uint8_t>(four(words[0]) | four(words[1]) << 4);
  }
}

// Rounds y = x * inverse + offset to [low, high], stores code - low and returns the sum of squares of what
// scale * code + base misses, of each block; adds it to `misses`.
inline V code_group(const float* x, V inverse, V offset, V scale, V base, float low, float high, Codes& codes,
                    Misses& misses) {
  const Spread by(inverse), plus(offset), d(scale), m(base);
  const V least = Simd::all(low), most = Simd::all(high);
  Bytes quads[8];
  V errors[kParts] = {Simd::all(0.0f), Simd::all(0.0f), Simd::all(0.0f), Simd::all(0.0f)};
  for (int t = 0; t < 8; ++t) {
    V q[kParts];
    for (int p = 0; p < kParts; ++p) {
      const V value = Simd::load_part(x, kBlock, t, p);
      const V y = Simd::fma(value, by.p[p], plus.p[p]);
      const V code = Simd::round(Simd::min(Simd::max(y, least), most));
      const V off = Simd::sub(value, Simd::fma(code, d.p[p], m.p[p]));
      errors[p] = Simd::fma(off, off, errors[p]);
      misses.total = Simd::fma(value, value, misses.total);
      q[p] = low == 0.0f ? code : Simd::sub(code, least);
    }
    quads[t] = Simd::to_unsigned(q);
  }
  Simd::store_codes(quads, codes.all, kBlock);
  Simd::store_codes(quads + 4, codes.all + 16, kBlock);
  const V error = Simd::add_across(errors);
  misses.error = Simd::add(misses.error, error);
  return error;
}

template <class Block>
inline void put_codes(const uint8_t* codes, Block& block) {
  pack_nibbles(codes, block.q);
  if constexpr (sizeof(block.q) + 4 < sizeof(Block)) pack_fifth_bits(codes, block.high);
}

template <class Block, int kHalf>
inline void encode_around_zero(const float* x, Block* out, Misses& misses) {
  const StoredHalves d(kHalf == 8 ? fit_4_bits(x) : fit_5_bits(x));
  const V zero = Simd::all(0.0f);
  Codes codes;
  code_group(x, inverse_or_zero(d.value), zero, d.value, zero, -kHalf, kHalf - 1, codes, misses);
  for (int b = 0; b < Simd::kBlocks; ++b) {
    out[b].d = d.bits[b];
    put_codes(codes.of(b), out[b]);
  }
}

template <class Block, int kTop>
inline void encode_above_min(const float* x, Block* out, Misses& misses) {
  const ScaleMin fit = fit_above_min<kTop, false>(x);
  const StoredHalves d(fit.scale), m(fit.min);
  const V inverse = inverse_or_zero(d.value);
  Codes codes;
  code_group(x, inverse, Simd::mul(Simd::sub(Simd::all(0.0f), m.value), inverse), d.value, m.value, 0.0f,
             kTop, codes, misses);
  for (int b = 0; b < Simd::kBlocks; ++b) {
    out[b].d = d.bits[b];
    out[b].m = m.bits[b];
    put_codes(codes.of(b), out[b]);
  }
}

// At 8 bits the search gains nothing that can be measured: the extreme value takes code 127.
inline void encode_q8_0(const float* x, BlockQ8_0* out, Misses& misses) {
  V most[kParts];
  for (int p = 0; p < kParts; ++p) {
    most[p] = Simd::abs(Simd::load_part(x, kBlock, 0, p));
    for (int t = 1; t < 8; ++t) most[p] = Simd::max(most[p], Simd::abs(Simd::load_part(x, kBlock, t, p)));
  }
  const StoredHalves d(Simd::div(Simd::max_across(most), Simd::all(127.0f)));
  const Spread inverse(inverse_or_zero(d.value)), scale(d.value);
  const V limit = Simd::all(127.0f), least = Simd::all(-127.0f);
  Bytes quads[8];
  for (int t = 0; t < 8; ++t) {
    V q[kParts];
    for (int p = 0; p < kParts; ++p) {
      const V value = Simd::load_part(x, kBlock, t, p);
      q[p] = Simd::round(Simd::max(Simd::min(Simd::mul(value, inverse.p[p]), limit), least));
      misses.add(Simd::sub(value, Simd::mul(q[p], scale.p[p])), value);
    }
    quads[t] = Simd::to_signed(q);
  }
  uint8_t* const codes = reinterpret_cast<uint8_t*>(out) + offsetof(BlockQ8_0, q);
  Simd::store_codes(quads, codes, sizeof(BlockQ8_0));
  Simd::store_codes(quads + 4, codes + 16, sizeof(BlockQ8_0));
  for (int b = 0; b < Simd::kBlocks; ++b) out[b].d = d.bits[b];
}

// ---------------------------------------------------------------- MXFP4

// The bounds between e2m1's magnitudes and the magnitudes, under a scale 2^step of the one that lets the
// extreme value in (its own exponent less 2): there a value is below 8, and kMxUnits of it are a byte.
constexpr float kMxUnits = 255.0f / 8.0f;
struct MxLevels {
  uint8_t limits[7], values[8];
  constexpr explicit MxLevels(float step) : limits(), values() {
    constexpr float kBounds[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    constexpr float kValues[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (int i = 0; i < 7; ++i) limits[i] = byte(kBounds[i] * step * kMxUnits + 0.999f);
    for (int i = 0; i < 8; ++i) values[i] = byte(kValues[i] * step * kMxUnits + 0.5f);
  }
  static constexpr uint8_t byte(float x) { return static_cast<uint8_t>(x < 255.0f ? x : 255.0f); }
};
constexpr MxLevels kMxLevels[3] = {MxLevels(0.5f), MxLevels(1.0f), MxLevels(2.0f)};

// That exponent, or a neighbour: one lower saturates the extremes and is finer for the rest, one higher
// rounds the extremes better. Exponents of e8m0, per block.
inline void fit_mxfp4(const float* x, uint32_t* exponents) {
  V low, high;
  find_ends<8>(x, low, high);
  float most[Simd::kBlocks], unit[Simd::kBlocks];
  Simd::store(most, Simd::max(high, Simd::sub(Simd::all(0.0f), low)));
  for (int b = 0; b < Simd::kBlocks; ++b) {
    std::memcpy(&exponents[b], &most[b], 4);
    exponents[b] = exponents[b] << 1 >> 24;
    exponents[b] =
        exponents[b] < 10 ? 8 : exponents[b] - 2;  // 2^-119 at the least, whose inverse has units too
    const uint32_t inverse = (254 - exponents[b]) << 23;
    std::memcpy(&unit[b], &inverse, 4);
  }
  const Spread factor(Simd::mul(Simd::load(unit), Simd::all(kMxUnits)));
  Ints sums[3] = {Simd::zero_ints(), Simd::zero_ints(), Simd::zero_ints()};
  for (int t = 0; t < 8; ++t) {
    V scaled[kParts];
    for (int p = 0; p < kParts; ++p) {
      scaled[p] = Simd::mul(Simd::abs(Simd::load_part(x, kBlock, t, p)), factor.p[p]);
    }
    const Bytes x8 = Simd::to_unsigned(scaled);
    for (int i = 0; i < 3; ++i)
      sums[i] = Simd::add_misses(sums[i], x8, kMxLevels[i].limits, kMxLevels[i].values);
  }
  float errors[3][Simd::kBlocks];
  for (int i = 0; i < 3; ++i) Simd::store(errors[i], Simd::to_float(sums[i]));
  for (int b = 0; b < Simd::kBlocks; ++b) {
    int best = 1;
    if (errors[0][b] < errors[best][b]) best = 0;
    if (errors[2][b] < errors[best][b]) best = 2;
    exponents[b] = exponents[b] + static_cast<uint32_t>(best) - 1;
  }
}

// A magnitude's code is the nearest integer to the least of three lines: steps of 0.5 up to 2, 1 up to 4,
// then 2.
inline void encode_mxfp4(const float* x, BlockMXFP4* out, Misses& misses) {
  uint32_t exponents[Simd::kBlocks];
  fit_mxfp4(x, exponents);
  float scales[Simd::kBlocks], inverses[Simd::kBlocks];
  for (int b = 0; b < Simd::kBlocks; ++b) {
    const uint32_t bits = exponents[b] << 23, inverse = (254 - exponents[b]) << 23;
    std::memcpy(&scales[b], &bits, 4);
    std::memcpy(&inverses[b], &inverse, 4);
  }
  const Spread scale(Simd::load(scales)), by(Simd::load(inverses));
  const V zero = Simd::all(0.0f), half = Simd::all(0.5f), two = Simd::all(2.0f), four = Simd::all(4.0f),
          seven = Simd::all(7.0f), eight = Simd::all(8.0f);
  Bytes quads[8];
  for (int t = 0; t < 8; ++t) {
    V q[kParts];
    for (int p = 0; p < kParts; ++p) {
      const V value = Simd::load_part(x, kBlock, t, p);
      const V y = Simd::mul(Simd::abs(value), by.p[p]);
      const V line = Simd::min(Simd::min(Simd::add(y, y), Simd::add(y, two)), Simd::fma(y, half, four));
      const V code = Simd::round(Simd::min(line, seven));
      const V level = Simd::max(Simd::max(Simd::mul(code, half), Simd::sub(code, two)),
                                Simd::sub(Simd::add(code, code), eight));
      misses.add(Simd::sub(Simd::abs(value), Simd::mul(level, scale.p[p])), value);
      const V minus = Simd::select(Simd::greater(zero, value), eight, zero);
      q[p] = Simd::select(Simd::greater(code, zero), Simd::add(code, minus), zero);
    }
    quads[t] = Simd::to_unsigned(q);
  }
  Codes codes;
  Simd::store_codes(quads, codes.all, kBlock);
  Simd::store_codes(quads + 4, codes.all + 16, kBlock);
  for (int b = 0; b < Simd::kBlocks; ++b) {
    out[b].e = static_cast<uint8_t>(exponents[b]);
    pack_nibbles(codes.of(b), out[b].q);
  }
}

// ---------------------------------------------------------------- groups, and single values

// Hands groups of kBlocks blocks of kElements to `encode`, the last one filled up with zeros.
template <class Block, int kElements, void (*kEncode)(const float*, Block*, Misses&)>
EncodeSums encode_groups(const float* x, int64_t blocks, uint8_t* out) {
  constexpr int kGroup = Simd::kBlocks;
  Misses misses;
  int64_t done = 0;
  for (; done + kGroup <= blocks; done += kGroup) {
    kEncode(x + done * kElements, reinterpret_cast<Block*>(out + done * static_cast<int64_t>(sizeof(Block))),
            misses);
  }
  if (done < blocks) {
    const auto count = static_cast<size_t>(blocks - done);
    float padded[kGroup * kElements] = {};
    Block last[kGroup];
    std::memcpy(padded, x + done * kElements, count * kElements * sizeof(float));
    kEncode(padded, last, misses);
    std::memcpy(out + done * static_cast<int64_t>(sizeof(Block)), last, count * sizeof(Block));
  }
  return misses.sums();
}

inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline void halves_of(const float* x, uint16_t* out, Misses& misses) {
  const V value = Simd::load(x);
  const StoredHalves half(value);
  std::memcpy(out, half.bits, sizeof half.bits);
  misses.add(Simd::sub(value, half.value), value);
}

EncodeSums encode_f16(const float* x, int64_t count, uint8_t* out) {
  constexpr int kWidth = Simd::kBlocks;
  Misses misses;
  uint16_t bits[kWidth];
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    halves_of(x + i, bits, misses);
    std::memcpy(out + 2 * i, bits, sizeof bits);
  }
  if (i < count) {
    float padded[kWidth] = {};
    std::memcpy(padded, x + i, static_cast<size_t>(count - i) * 4);
    halves_of(padded, bits, misses);
    std::memcpy(out + 2 * i, bits, static_cast<size_t>(count - i) * 2);
  }
  return misses.sums();
}

// Integer arithmetic in loops that every compiler makes vector code of.
EncodeSums encode_bf16(const float* x, int64_t count, uint8_t* out) {
  constexpr int64_t kPiece = 64;
  constexpr int kWidth = Simd::kBlocks;
  Misses misses;
  for (int64_t done = 0; done < count; done += kPiece) {
    const int64_t n = count - done < kPiece ? count - done : kPiece;
    float padded[kPiece] = {}, back[kPiece];
    uint16_t bits[kPiece];
    std::memcpy(padded, x + done, static_cast<size_t>(n) * 4);
    for (int i = 0; i < kPiece; ++i) {
      const uint32_t u = float_bits(padded[i]);
      const uint32_t rounded_bits = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
      bits[i] = static_cast<uint16_t>(rounded_bits);
      back[i] = bits_float(rounded_bits << 16);
    }
    std::memcpy(out + 2 * done, bits, static_cast<size_t>(n) * 2);
    for (int i = 0; i < kPiece; i += kWidth) {
      const V value = Simd::load(padded + i);
      misses.add(Simd::sub(value, Simd::load(back + i)), value);
    }
  }
  return misses.sums();
}

bool widen_f16(const uint8_t* x, int64_t count, float* out) {
  constexpr int kWidth = Simd::kBlocks;
  uint16_t most = 0, bits[kWidth];
  for (int64_t i = 0; i < count; ++i) {
    uint16_t magnitude;
    std::memcpy(&magnitude, x + 2 * i, sizeof magnitude);
    magnitude &= 0x7fff;
    most = magnitude > most ? magnitude : most;
  }
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    std::memcpy(bits, x + 2 * i, sizeof bits);
    Simd::store(out + i, Simd::load_halves(bits));
  }
  if (i < count) {
    std::memset(bits, 0, sizeof bits);
    std::memcpy(bits, x + 2 * i, static_cast<size_t>(count - i) * 2);
    float last[kWidth];
    Simd::store(last, Simd::load_halves(bits));
    std::memcpy(out + i, last, static_cast<size_t>(count - i) * 4);
  }
  return most < 0x7c00;
}

bool widen_bf16(const uint8_t* x, int64_t count, float* out) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, x + 2 * i, sizeof bits);
    const uint32_t wide = static_cast<uint32_t>(bits) << 16, magnitude = wide & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
    std::memcpy(out + i, &wide, sizeof wide);
  }
  return most < 0x7f800000u;
}
