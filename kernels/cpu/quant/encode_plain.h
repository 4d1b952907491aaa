// Encoders of single values and of blocks of 32, a group of blocks at a time. Included inside the anonymous
// namespace of the encoders' tables, after encode_search.h.
//
// Million values per second of a Neoverse-N1 core, measured (docs/benchmarks.md): f16 1,445, q8_0 1,355,
// mxfp4 1,050, bf16 961, q4_0 656, q5_0 594, q4_1 481, q5_1 434. All of them are bound by its two vector
// units, none by memory.
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

// Four bytes' fifth bits side by side: the product brings bit 8 i + 4 to bit 28 + i.
inline void pack_fifth_bits(const uint8_t* codes, uint8_t* high) {
  for (int j = 0; j < 4; ++j) {
    uint32_t words[2];
    std::memcpy(words, codes + 8 * j, sizeof words);
    const auto four = [](uint32_t w) { return ((w >> 4 & 0x01010101u) * 0x01020408u) >> 24 & 15u; };
    high[j] = static_cast<uint8_t>(four(words[0]) | four(words[1]) << 4);
  }
}

// The codes of a group to its blocks: four bits, and the fifth ones where there are any.
template <class Block>
inline void put_codes(const Bytes* quads, Block* out) {
  constexpr bool kFive = sizeof(out->q) + 4 < sizeof(Block);
  Bytes pairs[4];
  for (int t = 0; t < 4; ++t) {
    pairs[t] = kFive ? Simd::nibbles(Simd::and_bytes(quads[t], 15), Simd::and_bytes(quads[t + 4], 15))
                     : Simd::nibbles(quads[t], quads[t + 4]);
  }
  Simd::store_codes(pairs, reinterpret_cast<uint8_t*>(out) + offsetof(Block, q), sizeof(Block));
  if constexpr (kFive) {
    uint8_t codes[Simd::kBlocks * kBlock];
    Simd::store_codes(quads, codes, kBlock);
    Simd::store_codes(quads + 4, codes + 16, kBlock);
    for (int b = 0; b < Simd::kBlocks; ++b) pack_fifth_bits(codes + b * kBlock, out[b].high);
  }
}

// Every encoder goes through its steps for kBatch groups, one step after the other: a step ends in divisions
// and conversions that wait for each other, and the next group's beginning has no need to wait for them.
constexpr int kBatch = 4;
constexpr int kGroupElements = Simd::kBlocks * kBlock;

// Scales in words: as f16 holds them where they are small or large for it, or else as they are.
inline V as_halves_hold(const SignedRange& range, V scale) {
  const V wanted = Simd::mul(scale, range.unit()), size = Simd::abs(wanted);
  const Simd::Mask small = Simd::greater(Simd::all(0x1p-10f), size),
                   large = Simd::greater(size, Simd::all(kMostHalf));
  if (!Simd::any(small) && !Simd::any(large)) return scale;
  const V held = Simd::mul(StoredHalves(wanted).value, range.factor);
  return Simd::select(small, held, Simd::select(large, held, scale));
}

// Codes are rounded by the scale found, as f16 holds it, and stored with the scale that is best for them.
template <class Block>
inline void put_around_zero(const SignedRange& range, const CodeSums& sums, Block* out, Misses& misses) {
  const V unit = range.unit(), square = Simd::mul(unit, unit);
  const StoredHalves d(Simd::mul(Simd::div(sums.xq, Simd::max(sums.qq, Simd::all(1.0f))), unit));
  misses.error = Simd::fma(square, sums.missed(Simd::mul(d.value, range.factor)), misses.error);
  misses.total = Simd::fma(square, sums.xx, misses.total);
  for (int b = 0; b < Simd::kBlocks; ++b) out[b].d = d.bits[b];
}

template <class Block, int kBits>
inline void encode_around_zero(const float* x, int groups, Block* out, Misses& misses) {
  SignedRange ranges[kBatch];
  FineValues<8> fine[kBatch];
  V scales[kBatch];
  Growth growths[kBatch];
  CodeSums sums[kBatch];
  for (int g = 0; g < groups; ++g) ranges[g] = signed_range<8, kBlock>(x + g * kGroupElements);
  for (int g = 0; g < groups; ++g) {
    scales[g] = fit_signed<kBits, 8, kBlock>(x + g * kGroupElements, ranges[g], fine[g]);
  }
  for (int g = 0; g < groups; ++g) {
    const V scale = as_halves_hold(ranges[g], scales[g]);
    growths[g] = growth_of<kBits>(Simd::div(Simd::all(65536 >> kBits), Simd::max(scale, Simd::all(1.0f))));
  }
  for (int g = 0; g < groups; ++g) {
    Bytes quads[8];
    sums[g] = code_signed<kBits>(fine[g], growths[g], quads);
    put_codes(quads, out + g * Simd::kBlocks);
  }
  for (int g = 0; g < groups; ++g) put_around_zero(ranges[g], sums[g], out + g * Simd::kBlocks, misses);
}

// What the values of blocks add up to, squared: of middle + unit * word.
inline V total_of(const MinRange& range, const LineSums& sums) {
  const V twice = Simd::add(range.middle, range.middle), middles = Simd::mul(range.middle, range.middle);
  const V words = Simd::mul(range.unit, Simd::fma(range.unit, sums.xx, Simd::mul(twice, sums.x)));
  return Simd::fma(middles, Simd::all(kBlock), words);
}

// As above: rounded by a line that f16 holds, and stored with the line that is best for the codes.
template <class Block, int kTop>
inline void put_above_min(const MinRange& range, const LineSums& sums, Block* out, Misses& misses) {
  constexpr int kHalf = MinSearch<kTop>::kHalf;
  const V count = Simd::all(kBlock), one = Simd::all(1.0f), share = Simd::all(1.0f / kBlock),
          half = Simd::all(kHalf), halves = Simd::all(kHalf * kBlock);
  const V variance = Simd::max(Simd::sub(Simd::mul(count, sums.qq), Simd::mul(sums.q, sums.q)), one);
  const V slope = Simd::div(Simd::sub(Simd::mul(count, sums.xq), Simd::mul(sums.x, sums.q)), variance);
  // The minimum first: far from zero f16 holds it less well than the scale, which is then the best with it.
  const V q0 = Simd::add(sums.q, halves);  // codes from 0
  const V base = Simd::mul(Simd::sub(sums.x, Simd::mul(slope, q0)), share);
  const StoredHalves m(Simd::fma(base, range.unit, range.middle));
  const V held = Simd::mul(Simd::sub(m.value, range.middle), range.per_unit);
  const V xq0 = Simd::fma(half, sums.x, sums.xq), qq0 = Simd::fma(half, Simd::add(sums.q, q0), sums.qq);
  const V scale = Simd::div(Simd::sub(xq0, Simd::mul(held, q0)), Simd::max(qq0, one));
  const StoredHalves d(Simd::mul(scale, range.unit));
  const V step = Simd::mul(d.value, range.per_unit);
  const V off = sums.missed(step, Simd::fma(half, step, held));
  misses.error = Simd::fma(Simd::mul(range.unit, range.unit), off, misses.error);
  misses.total = Simd::add(misses.total, total_of(range, sums));
  for (int b = 0; b < Simd::kBlocks; ++b) {
    out[b].d = d.bits[b];
    out[b].m = m.bits[b];
  }
}

template <class Block, int kTop>
inline void encode_above_min(const float* x, int groups, Block* out, Misses& misses) {
  MinRange ranges[kBatch];
  MinFit fits[kBatch];
  MinValues fine[kBatch];
  Slope slopes[kBatch];
  Line lines[kBatch];
  LineSums sums[kBatch];
  for (int g = 0; g < groups; ++g) ranges[g] = min_range<kTop, false, kBlock>(x + g * kGroupElements);
  for (int g = 0; g < groups; ++g) {
    set_min_values<kBlock>(x + g * kGroupElements, ranges[g], fine[g]);
    slopes[g] = search_above_min<kTop, false>(fine[g], ranges[g].low);
  }
  for (int g = 0; g < groups; ++g) fits[g] = fit_above_min<kTop, false>(ranges[g], fine[g], slopes[g]);
  for (int g = 0; g < groups; ++g) {
    lines[g] =
        line_to_codes<kTop>(ranges[g], StoredHalves(fits[g].scale).value, StoredHalves(fits[g].min).value);
  }
  for (int g = 0; g < groups; ++g) {
    Bytes quads[8];
    sums[g] = code_line<kTop>(fine[g], lines[g], quads);
    put_codes(quads, out + g * Simd::kBlocks);
  }
  for (int g = 0; g < groups; ++g) {
    put_above_min<Block, kTop>(ranges[g], sums[g], out + g * Simd::kBlocks, misses);
  }
}

// kClamp: f16 holds the scale too small, by more than what rounds down to 127.
template <bool kClamp>
inline void code_8_bits(const float* x, V d, V inverses, Bytes* quads, Misses& misses) {
  const Spread inverse(inverses), scale(d);
  const V limit = Simd::all(127.0f), least = Simd::all(-127.0f), magic = Simd::all(kMagic);
  for (int t = 0; t < 8; ++t) {
    V sums[kParts];
    for (int p = 0; p < kParts; ++p) {
      const V value = Simd::load_part(x, kBlock, t, p);
      V y = Simd::mul(value, inverse.p[p]);
      if (kClamp) y = Simd::max(Simd::min(y, limit), least);
      sums[p] = Simd::add(y, magic);
      misses.add(Simd::sub(value, Simd::mul(Simd::sub(sums[p], magic), scale.p[p])), value);
    }
    quads[t] = Simd::low_bytes(Simd::words(sums));
  }
}

// At 8 bits the search gains nothing that can be measured: the extreme value takes code 127.
inline void encode_q8_0(const float* x, int groups, BlockQ8_0* out, Misses& misses) {
  V values[kBatch], inverses[kBatch];
  bool clamp = false;
  for (int g = 0; g < groups; ++g) {
    V most[kParts];
    for (int p = 0; p < kParts; ++p) {
      const float* block = x + g * kGroupElements;
      most[p] = Simd::abs(Simd::load_part(block, kBlock, 0, p));
      for (int t = 1; t < 8; ++t) {
        most[p] = Simd::max(most[p], Simd::abs(Simd::load_part(block, kBlock, t, p)));
      }
    }
    const V extreme = Simd::max_across(most);
    const StoredHalves d(Simd::div(extreme, Simd::all(127.0f)));
    values[g] = d.value;
    inverses[g] = inverse_or_zero(d.value);
    clamp |= Simd::any(Simd::greater(extreme, Simd::mul(d.value, Simd::all(127.25f))));
    for (int b = 0; b < Simd::kBlocks; ++b) out[g * Simd::kBlocks + b].d = d.bits[b];
  }
  for (int g = 0; g < groups; ++g, out += Simd::kBlocks) {
    const float* block = x + g * kGroupElements;
    Bytes quads[8];
    if (clamp) {
      code_8_bits<true>(block, values[g], inverses[g], quads, misses);
    } else {
      code_8_bits<false>(block, values[g], inverses[g], quads, misses);
    }
    uint8_t* const codes = reinterpret_cast<uint8_t*>(out) + offsetof(BlockQ8_0, q);
    Simd::store_codes(quads, codes, sizeof(BlockQ8_0));
    Simd::store_codes(quads + 4, codes + 16, sizeof(BlockQ8_0));
  }
}

// ---------------------------------------------------------------- MXFP4

// Under the scale that lets the extreme value in (its own exponent less 2) a value is below 8, and kMxUnits
// of it are the upper byte of a word. The bounds between e2m1's magnitudes are then multiples of 4 such
// bytes, of 2 under half that scale and of 8 under twice it: the bits above say which is nearest.
constexpr float kMxUnits = 16.0f;
constexpr int kMxBounds[7] = {1, 3, 5, 7, 10, 14, 20}, kMxValues[8] = {0, 2, 4, 6, 8, 12, 16, 24};
struct MxTable {
  uint8_t
      of[32];  // by how many times the bounds' common part fits: a code, or the number `values` has for it
  constexpr explicit MxTable(int step) : of() {
    for (int i = 0; i < 32; ++i) {
      int code = 0;
      for (const int bound : kMxBounds) code += i >= bound ? 1 : 0;
      of[i] = static_cast<uint8_t>(step == 0 ? code : kMxValues[code] * step);
    }
  }
};
constexpr MxTable kMxCodes(0), kMxQuarters(1), kMxFine(2), kMxMiddle(4), kMxCoarse(8);

// That scale of each block, a power of two, and what makes words of its values.
struct MxRange {
  V scale, factor;
};

inline MxRange mx_range(const float* x) {
  V low, high;
  find_ends<8, kBlock>(x, low, high);
  const V most = Simd::max(high, Simd::sub(Simd::all(0.0f), low));
  // 2^-114 at the least, whose inverse has words too.
  const V scale = Simd::max(Simd::mul(Simd::power_of(most), Simd::all(0.25f)), Simd::all(0x1p-114f));
  // A little less than it should be, or the largest would be no word.
  const V words = Simd::all(256.0f * kMxUnits * (1.0f - 0x1p-15f));
  return {scale, Simd::mul(Simd::div(Simd::all(1.0f), scale), words)};
}

// Magnitudes of values in words: their bytes, bytes with their signs, and the sum of their squares.
struct MxValues {
  Bytes high[8], low[8], signs[8];
  V squares;
};

inline void set_mx_values(const float* x, V factors, MxValues& out) {
  const Spread factor(factors);
  const V zero = Simd::all(0.0f), magic = Simd::all(kMagic);
  V squares[kParts] = {zero, zero, zero, zero};
  for (int t = 0; t < 8; ++t) {
    V sums[kParts];
    for (int p = 0; p < kParts; ++p) {
      const V y = Simd::mul(Simd::load_part(x, kBlock, t, p), factor.p[p]);
      sums[p] = Simd::add(y, magic);
      squares[p] = Simd::fma(y, y, squares[p]);
    }
    const Words words = Simd::words(sums), magnitudes = Simd::abs(words);
    out.signs[t] = Simd::high_bytes(words);
    out.high[t] = Simd::high_bytes(magnitudes);
    out.low[t] = Simd::low_bytes(magnitudes);
  }
  out.squares = Simd::add_across(squares);
}

// That scale, or half of it, which saturates the extremes and is finer for the rest, or twice it, which
// rounds the extremes better; and how many bits of the upper bytes are then below those that say which
// magnitude is nearest: 2, 1 or 3.
struct MxFit {
  V by, bits;
};

inline MxFit fit_mxfp4(const MxValues& x) {
  Ints fine = Simd::zero_ints(), middle = fine, coarse = fine;
  for (int t = 0; t < 8; ++t) {
    const Bytes low = Simd::min_bytes(x.high[t], Simd::all_bytes(63));
    fine = Simd::add_misses(fine, x.high[t], Simd::look_up<1>(kMxFine.of, low));
    middle = Simd::add_misses(middle, x.high[t], Simd::look_up<2>(kMxMiddle.of, x.high[t]));
    coarse = Simd::add_misses(coarse, x.high[t], Simd::look_up<3>(kMxCoarse.of, x.high[t]));
  }
  const V by_fine = Simd::to_float(fine), by_middle = Simd::to_float(middle);
  const Simd::Mask finer = Simd::greater(by_middle, by_fine);
  const Simd::Mask coarser = Simd::greater(Simd::select(finer, by_fine, by_middle), Simd::to_float(coarse));
  const auto pick = [&](float one, float half, float two) {
    return Simd::select(coarser, Simd::all(two), Simd::select(finer, Simd::all(half), Simd::all(one)));
  };
  return {pick(1.0f, 0.5f, 2.0f), pick(2.0f, 1.0f, 3.0f)};
}

// Sums over products of words and four times the levels, and over squares of the latter.
struct MxSums {
  V products, squares;
};

inline MxSums code_mxfp4(const MxValues& x, V bits, Bytes* quads) {
  const Spread sums(Simd::add(bits, Simd::all(kMagic)));
  const Bytes shifts = Simd::low_bytes(Simd::words(sums.p));
  Ints high = Simd::zero_ints(), low = high, squares = high;
  for (int t = 0; t < 8; ++t) {
    const Bytes at = Simd::min_bytes(Simd::shift_down(x.high[t], shifts), Simd::all_bytes(31));
    const Bytes quarters = Simd::look_up<0>(kMxQuarters.of, at);
    high = Simd::dot_small(high, x.high[t], quarters);
    low = Simd::dot_small(low, x.low[t], quarters);
    squares = Simd::dot_small(squares, quarters, quarters);
    quads[t] = Simd::with_signs(Simd::look_up<0>(kMxCodes.of, at), x.signs[t]);
  }
  return {Simd::to_float(high, low), Simd::to_float(squares)};
}

inline void put_mxfp4(const MxRange& range, const MxValues& x, V by, const MxSums& sums, BlockMXFP4* out,
                      Misses& misses) {
  const V words = Simd::mul(by, Simd::all(64.0f * kMxUnits));  // a quarter, under the scale found
  const V gain =
      Simd::mul(words, Simd::sub(Simd::add(sums.products, sums.products), Simd::mul(words, sums.squares)));
  const V unit = Simd::mul(range.scale, Simd::all(1.0f / (256.0f * kMxUnits)));
  const V square = Simd::mul(unit, unit);
  misses.error = Simd::fma(square, Simd::max(Simd::sub(x.squares, gain), Simd::all(0.0f)), misses.error);
  misses.total = Simd::fma(square, x.squares, misses.total);
  float scales[Simd::kBlocks];
  Simd::store(scales, Simd::mul(range.scale, by));
  for (int b = 0; b < Simd::kBlocks; ++b) {
    uint32_t bits_of_scale;
    std::memcpy(&bits_of_scale, &scales[b], sizeof bits_of_scale);
    out[b].e = static_cast<uint8_t>(bits_of_scale >> 23);
  }
}

inline void encode_mxfp4(const float* x, int groups, BlockMXFP4* out, Misses& misses) {
  MxRange ranges[kBatch];
  MxValues values[kBatch];
  MxFit fits[kBatch];
  MxSums sums[kBatch];
  for (int g = 0; g < groups; ++g) ranges[g] = mx_range(x + g * kGroupElements);
  for (int g = 0; g < groups; ++g) set_mx_values(x + g * kGroupElements, ranges[g].factor, values[g]);
  for (int g = 0; g < groups; ++g) fits[g] = fit_mxfp4(values[g]);
  for (int g = 0; g < groups; ++g) {
    Bytes quads[8];
    sums[g] = code_mxfp4(values[g], fits[g].bits, quads);
    put_codes(quads, out + g * Simd::kBlocks);
  }
  for (int g = 0; g < groups; ++g) {
    put_mxfp4(ranges[g], values[g], fits[g].by, sums[g], out + g * Simd::kBlocks, misses);
  }
}

// ---------------------------------------------------------------- groups, and single values

// Hands groups of blocks to `encode`, kBatch at a time, the last one filled up with zeros.
template <class Block, void (*kEncode)(const float*, int, Block*, Misses&)>
EncodeSums encode_groups(const float* x, int64_t blocks, uint8_t* out) {
  constexpr int kGroup = Simd::kBlocks;
  Misses misses;
  int64_t done = 0;
  const auto at = [&] { return reinterpret_cast<Block*>(out + done * static_cast<int64_t>(sizeof(Block))); };
  for (; done + kGroup <= blocks;) {
    const int64_t whole = (blocks - done) / kGroup;
    const int groups = whole < kBatch ? static_cast<int>(whole) : kBatch;
    kEncode(x + done * kBlock, groups, at(), misses);
    done += groups * kGroup;
  }
  if (done < blocks) {
    const auto count = static_cast<size_t>(blocks - done);
    float padded[kGroupElements] = {};
    Block last[kGroup];
    std::memcpy(padded, x + done * kBlock, count * kBlock * sizeof(float));
    kEncode(padded, 1, last, misses);
    std::memcpy(at(), last, count * sizeof(Block));
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
  uint16_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, x + 2 * i, sizeof bits);
    const auto magnitude = static_cast<uint16_t>(bits & 0x7fff);
    most = magnitude > most ? magnitude : most;
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    std::memcpy(out + i, &wide, sizeof wide);
  }
  return most < 0x7f80;
}
