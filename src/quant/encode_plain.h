// Encoders of single values and of blocks of 32, a group of blocks at a time. Included inside the anonymous
// namespace of the encoders' tables, after encode_search.h.
//
// Million values per second of a Neoverse-N1 core, measured (docs/benchmarks.md): f16 1,445, q8_0 1,355, bf16
// 961, mxfp4 554, q4_0 436, q5_0 410, q4_1 389, q5_1 364. All of them are bound by its two vector units, none
// by memory.
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

// How the values of some blocks become codes: y = x / unit + offset, rounded to [0, top]. x is then unit *
// (code - offset) and what is left over. A block of scale 0 has the code 0 alone.
struct Coding {
  V unit, inverse, offset, top;
  Coding() = default;
  Coding(V scale, V base, float most) {
    const V zero = Simd::all(0.0f), one = Simd::all(1.0f);
    const Simd::Mask some = Simd::greater(scale, Simd::all(kLeastRange));
    unit = Simd::select(some, scale, one);
    inverse = Simd::div(one, unit);
    offset = Simd::mul(Simd::sub(zero, base), inverse);
    top = Simd::select(some, Simd::all(most), zero);
  }
};

// Of each block: sums of codes, of what they leave over (in units), of products.
struct Leftovers {
  V q, r, qq, rq, rr;
};

inline Leftovers code_group(const float* x, const Coding& coding, Bytes* quads) {
  const V zero = Simd::all(0.0f), magic = Simd::all(kMagic);
  const Spread by(coding.inverse), plus(coding.offset), most(coding.top);
  V r[kParts] = {zero, zero, zero, zero}, rq[kParts] = {zero, zero, zero, zero},
    rr[kParts] = {zero, zero, zero, zero};
  Ints q = Simd::zero_ints(), qq = q;
  for (int t = 0; t < 8; ++t) {
    V sums[kParts];
    for (int p = 0; p < kParts; ++p) {
      const V y = Simd::fma(Simd::load_part(x, kBlock, t, p), by.p[p], plus.p[p]);
      sums[p] = Simd::add(Simd::min(Simd::max(y, zero), most.p[p]), magic);
      const V code = Simd::sub(sums[p], magic), rest = Simd::sub(y, code);
      r[p] = Simd::add(r[p], rest);
      rq[p] = Simd::fma(rest, code, rq[p]);
      rr[p] = Simd::fma(rest, rest, rr[p]);
    }
    quads[t] = Simd::low_bytes(sums);
    q = Simd::sum_signed(q, quads[t]);
    qq = Simd::dot_signed(qq, quads[t], quads[t]);
  }
  return {Simd::to_float(q), Simd::add_across(r), Simd::to_float(qq), Simd::add_across(rq),
          Simd::add_across(rr)};
}

// What the codes miss once the scale is more by `more` units and the base by `up` units: the codes stay.
inline V missed(const Coding& coding, const Leftovers& left, V more, V up) {
  const V zero = Simd::all(0.0f), count = Simd::all(kBlock), two = Simd::all(2.0f);
  // (r - more q - up)^2
  const V cross = Simd::sub(Simd::sub(Simd::mul(Simd::mul(more, up), left.q), Simd::mul(more, left.rq)),
                            Simd::mul(up, left.r));
  const V own = Simd::fma(Simd::mul(more, more), left.qq, Simd::mul(Simd::mul(up, up), count));
  const V off = Simd::max(Simd::add(left.rr, Simd::fma(cross, two, own)), zero);
  return Simd::mul(Simd::mul(coding.unit, coding.unit), off);
}

// What the values' squares add up to.
inline V total_of(const Coding& coding, const Leftovers& left) {
  // (q + r - offset)^2
  const V values = Simd::add(Simd::fma(left.rq, Simd::all(2.0f), left.qq), left.rr);
  const V shifted = Simd::mul(Simd::mul(coding.offset, Simd::all(-2.0f)), Simd::add(left.q, left.r));
  const V all =
      Simd::fma(Simd::mul(coding.offset, coding.offset), Simd::all(kBlock), Simd::add(values, shifted));
  return Simd::mul(Simd::mul(coding.unit, coding.unit), Simd::max(all, Simd::all(0.0f)));
}

// Every encoder goes through its steps for kBatch groups, one step after the other: a step ends in divisions
// and conversions that wait for each other, and the next group's beginning has no need to wait for them.
constexpr int kBatch = 4;
constexpr int kGroupElements = Simd::kBlocks * kBlock;

// Codes of a group rounded by the scale `first`, which f16 holds; stored with the scale that is best for
// them.
template <class Block, int kHalf>
inline void code_around_zero(const float* x, V first, V inverse, Block* out, Misses& misses) {
  const V zero = Simd::all(0.0f), one = Simd::all(1.0f);
  const Spread by(inverse);
  Bytes quads[8];
  Rests left;
  for (int t = 0; t < 8; ++t) quads[t] = left.template code_quad<kHalf, kBlock>(x, t, by);
  const V qq = Simd::to_float(left.qq), products = Simd::add_across(left.rq),
          rests = Simd::add_across(left.rr);
  const StoredHalves d(Simd::fma(first, Simd::div(products, Simd::max(qq, one)), first));
  // x - d q is unit * (r - more q), and unit is 1 / inverse: first, or 1 where that is 0.
  const V more = Simd::mul(Simd::sub(d.value, first), inverse);
  const V unit = Simd::select(Simd::greater(Simd::abs(first), zero), first, one);
  const V twice = Simd::add(products, products), square = Simd::mul(unit, unit);
  const V change = Simd::mul(more, Simd::sub(Simd::mul(more, qq), twice));
  misses.error = Simd::fma(square, Simd::max(Simd::add(rests, change), zero), misses.error);
  misses.total = Simd::fma(square, Simd::add(Simd::add(rests, qq), twice), misses.total);
  for (int b = 0; b < Simd::kBlocks; ++b) out[b].d = d.bits[b];
  put_codes(quads, out);
}

template <class Block, int kHalf>
inline void encode_around_zero(const float* x, int groups, Block* out, Misses& misses) {
  SignedRange ranges[kBatch];
  V firsts[kBatch], inverses[kBatch];
  for (int g = 0; g < groups; ++g) ranges[g] = signed_range<8, kBlock>(x + g * kGroupElements);
  for (int g = 0; g < groups; ++g) {
    const float* values = x + g * kGroupElements;
    const StoredHalves d(kHalf == 8 ? fit_4_bits(values, ranges[g]) : fit_5_bits(values, ranges[g]));
    const V one = Simd::all(1.0f);
    // What has scale 0 in f16 is nothing in units of 1.
    firsts[g] = d.value;
    inverses[g] =
        Simd::div(one, Simd::select(Simd::greater(Simd::abs(d.value), Simd::all(0.0f)), d.value, one));
  }
  for (int g = 0; g < groups; ++g) {
    code_around_zero<Block, kHalf>(x + g * kGroupElements, firsts[g], inverses[g], out + g * Simd::kBlocks,
                                   misses);
  }
}

// As above: rounded by a line that f16 holds, and stored with the line that is best for the codes.
template <class Block, int kTop>
inline void code_above_min(const float* x, V first, V base, const Coding& coding, Block* out,
                           Misses& misses) {
  Bytes quads[8];
  const Leftovers left = code_group(x, coding, quads);
  const V count = Simd::all(kBlock), one = Simd::all(1.0f), share = Simd::all(1.0f / kBlock);
  const V variance = Simd::max(Simd::sub(Simd::mul(count, left.qq), Simd::mul(left.q, left.q)), one);
  const V slope = Simd::div(Simd::sub(Simd::mul(count, left.rq), Simd::mul(left.r, left.q)), variance);
  // The minimum first: far from zero f16 holds it less well than the scale, which is then the best with it.
  const V up = Simd::mul(Simd::sub(left.r, Simd::mul(slope, left.q)), share);
  const StoredHalves m(Simd::fma(up, coding.unit, base));
  const V moved = Simd::mul(Simd::sub(m.value, base), coding.inverse);
  const V products = Simd::sub(left.rq, Simd::mul(moved, left.q));
  const StoredHalves d(Simd::fma(first, Simd::div(products, Simd::max(left.qq, one)), first));
  const V more = Simd::mul(Simd::sub(d.value, first), coding.inverse);
  misses.error = Simd::add(misses.error, missed(coding, left, more, moved));
  misses.total = Simd::add(misses.total, total_of(coding, left));
  for (int b = 0; b < Simd::kBlocks; ++b) {
    out[b].d = d.bits[b];
    out[b].m = m.bits[b];
  }
  put_codes(quads, out);
}

template <class Block, int kTop>
inline void encode_above_min(const float* x, int groups, Block* out, Misses& misses) {
  MinRange ranges[kBatch];
  V firsts[kBatch], bases[kBatch];
  Coding codings[kBatch];
  for (int g = 0; g < groups; ++g) ranges[g] = min_range<kTop, false, kBlock>(x + g * kGroupElements);
  for (int g = 0; g < groups; ++g) {
    const MinFit fit = fit_above_min<kTop, false, kBlock>(x + g * kGroupElements, ranges[g]);
    firsts[g] = StoredHalves(fit.scale).value;
    bases[g] = StoredHalves(fit.min).value;
    codings[g] = Coding(firsts[g], bases[g], kTop);
  }
  for (int g = 0; g < groups; ++g) {
    code_above_min<Block, kTop>(x + g * kGroupElements, firsts[g], bases[g], codings[g],
                                out + g * Simd::kBlocks, misses);
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
    quads[t] = Simd::low_bytes(sums);
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
// of it are a byte. The bounds between e2m1's magnitudes are then multiples of 8 bytes, of 4 under half that
// scale and of 16 under twice it: the nearest magnitude, as a byte, is found by the bits above them.
constexpr float kMxUnits = 32.0f;
struct MxLevels {
  uint8_t nearest[32];
  constexpr explicit MxLevels(int step) : nearest() {  // bytes of the bounds' grid, 4, 8 or 16
    constexpr int kBounds[7] = {1, 3, 5, 7, 10, 14, 20}, kValues[8] = {0, 2, 4, 6, 8, 12, 16, 24};
    for (int i = 0; i < 32; ++i) {
      int code = 0;
      for (const int bound : kBounds) code += i >= bound ? 1 : 0;
      const int value = kValues[code] * step;
      nearest[i] = static_cast<uint8_t>(value < 255 ? value : 255);
    }
  }
};
constexpr MxLevels kMxFine(4), kMxMiddle(8), kMxCoarse(16);

// That exponent, as e8m0 has it, per block; and what makes bytes of the values.
inline void find_mx_exponents(const float* x, uint32_t* exponents, V& factors) {
  V low, high;
  find_ends<8, kBlock>(x, low, high);
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
  factors = Simd::mul(Simd::load(unit), Simd::all(kMxUnits));
}

// That exponent, or a neighbour: one lower saturates the extremes and is finer for the rest, one higher
// rounds the extremes better.
inline void fit_mxfp4(const float* x, V factors, uint32_t* exponents) {
  const Spread factor(factors);
  const V magic = Simd::all(kMagic), last = Simd::all(255.0f);
  Ints sums[3] = {Simd::zero_ints(), Simd::zero_ints(), Simd::zero_ints()};
  for (int t = 0; t < 8; ++t) {
    V scaled[kParts];
    for (int p = 0; p < kParts; ++p) {
      const V y = Simd::mul(Simd::abs(Simd::load_part(x, kBlock, t, p)), factor.p[p]);
      scaled[p] = Simd::add(Simd::min(y, last), magic);
    }
    const Bytes x8 = Simd::low_bytes(scaled);
    const Bytes fine = Simd::look_up<2>(kMxFine.nearest, Simd::min_bytes(x8, Simd::all_bytes(127)));
    sums[0] = Simd::add_misses(sums[0], x8, fine);
    sums[1] = Simd::add_misses(sums[1], x8, Simd::look_up<3>(kMxMiddle.nearest, x8));
    sums[2] = Simd::add_misses(sums[2], x8, Simd::look_up<4>(kMxCoarse.nearest, x8));
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

// Codes of twice e2m1's magnitudes.
constexpr uint8_t kCodeOfDoubled[16] = {0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7, 0, 0, 0};

// A magnitude of e2m1 has two bits: steps of half its power of two, and of 0.5 below 1. A sum with 1.5 * 2^23
// of those steps has no bits left below one.
inline void code_mxfp4(const float* x, const uint32_t* exponents, BlockMXFP4* out, Misses& misses) {
  float scales[Simd::kBlocks], inverses[Simd::kBlocks];
  for (int b = 0; b < Simd::kBlocks; ++b) {
    const uint32_t bits = exponents[b] << 23, inverse = (254 - exponents[b]) << 23;
    std::memcpy(&scales[b], &bits, 4);
    std::memcpy(&inverses[b], &inverse, 4);
  }
  const V scale = Simd::load(scales);
  const Spread by(Simd::load(inverses));
  const V zero = Simd::all(0.0f), one = Simd::all(1.0f), six = Simd::all(6.0f), minus_six = Simd::all(-6.0f),
          magic = Simd::all(0.5f * kMagic);
  V error[kParts] = {zero, zero, zero, zero}, total[kParts] = {zero, zero, zero, zero};
  Bytes quads[8];
  for (int t = 0; t < 8; ++t) {
    V doubled[kParts];
    for (int p = 0; p < kParts; ++p) {
      const V y = Simd::mul(Simd::load_part(x, kBlock, t, p), by.p[p]);
      const V held = Simd::max(Simd::min(y, six), minus_six);
      const V power = Simd::power_of(Simd::max(Simd::abs(held), one));
      const V steps = Simd::mul(power, magic);
      const V level = Simd::sub(Simd::add(held, steps), steps), off = Simd::sub(y, level);
      error[p] = Simd::fma(off, off, error[p]);
      total[p] = Simd::fma(y, y, total[p]);
      doubled[p] = Simd::add(level, magic);
    }
    quads[t] = Simd::e2m1_codes(Simd::low_bytes(doubled), kCodeOfDoubled);
  }
  const V square = Simd::mul(scale, scale);
  misses.error = Simd::fma(square, Simd::add_across(error), misses.error);
  misses.total = Simd::fma(square, Simd::add_across(total), misses.total);
  for (int b = 0; b < Simd::kBlocks; ++b) out[b].e = static_cast<uint8_t>(exponents[b]);
  put_codes(quads, out);
}

inline void encode_mxfp4(const float* x, int groups, BlockMXFP4* out, Misses& misses) {
  uint32_t exponents[kBatch][Simd::kBlocks];
  V factors[kBatch];
  for (int g = 0; g < groups; ++g) find_mx_exponents(x + g * kGroupElements, exponents[g], factors[g]);
  for (int g = 0; g < groups; ++g) fit_mxfp4(x + g * kGroupElements, factors[g], exponents[g]);
  for (int g = 0; g < groups; ++g) {
    code_mxfp4(x + g * kGroupElements, exponents[g], out + g * Simd::kBlocks, misses);
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
