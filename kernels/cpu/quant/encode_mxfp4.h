// The encoder of MXFP4: the power of two of a block is searched among three, codes are looked up. 1,050
// million values per second of a Neoverse-N1 core (docs/benchmarks.md).
#pragma once

#include <stdint.h>
#include <cstring>

#include "kernels/cpu/quant/encode_group.h"
#include "kernels/cpu/quant/group_values.h"
#include "kernels/cpu/simd/lanes.h"
#include "kernels/quant/blocks.h"

namespace millrace::quant::MILLRACE_TARGET {
namespace {

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
  const V highest = Lanes::max(high, Lanes::sub(Lanes::all(0.0f), low));
  // 2^-114 at the least, whose inverse has words too.
  const V scale = Lanes::max(Lanes::mul(Lanes::power_of(highest), Lanes::all(0.25f)), Lanes::all(0x1p-114f));
  // A little less than it should be, or the largest would be no word.
  const V words = Lanes::all(256.0f * kMxUnits * (1.0f - 0x1p-15f));
  return {scale, Lanes::mul(Lanes::div(Lanes::all(1.0f), scale), words)};
}

// Magnitudes of values in words: their bytes, bytes with their signs, and the sum of their squares.
struct MxValues {
  Bytes high[8], low[8], signs[8];
  V squares;
};

inline void set_mx_values(const float* x, V factors, MxValues& out) {
  const Spread factor(factors);
  const V zero = Lanes::all(0.0f), magic = Lanes::all(kMagic);
  V squares[kParts] = {zero, zero, zero, zero};
  for (int t = 0; t < 8; ++t) {
    V sums[kParts];
    for (int p = 0; p < kParts; ++p) {
      const V y = Lanes::mul(Lanes::load_part(x, kBlock, t, p), factor.p[p]);
      sums[p] = Lanes::add(y, magic);
      squares[p] = Lanes::fma(y, y, squares[p]);
    }
    const Words words = Lanes::words(sums), magnitudes = Lanes::abs(words);
    out.signs[t] = Lanes::high_bytes(words);
    out.high[t] = Lanes::high_bytes(magnitudes);
    out.low[t] = Lanes::low_bytes(magnitudes);
  }
  out.squares = Lanes::add_across(squares);
}

// That scale, or half of it, which saturates the extremes and is finer for the rest, or twice it, which
// rounds the extremes better; and how many bits of the upper bytes are then below those that say which
// magnitude is nearest: 2, 1 or 3.
struct MxFit {
  V by, bits;
};

inline MxFit fit_mxfp4(const MxValues& x) {
  Ints fine = Lanes::zero_ints(), middle = fine, coarse = fine;
  for (int t = 0; t < 8; ++t) {
    const Bytes low = Lanes::min_bytes(x.high[t], Lanes::all_bytes(63));
    fine = Lanes::add_misses(fine, x.high[t], Lanes::look_up<1>(kMxFine.of, low));
    middle = Lanes::add_misses(middle, x.high[t], Lanes::look_up<2>(kMxMiddle.of, x.high[t]));
    coarse = Lanes::add_misses(coarse, x.high[t], Lanes::look_up<3>(kMxCoarse.of, x.high[t]));
  }
  const V by_fine = Lanes::to_float(fine), by_middle = Lanes::to_float(middle);
  const Lanes::Mask finer = Lanes::greater(by_middle, by_fine);
  const Lanes::Mask coarser =
      Lanes::greater(Lanes::select(finer, by_fine, by_middle), Lanes::to_float(coarse));
  const auto pick = [&](float one, float half, float two) {
    return Lanes::select(coarser, Lanes::all(two), Lanes::select(finer, Lanes::all(half), Lanes::all(one)));
  };
  return {pick(1.0f, 0.5f, 2.0f), pick(2.0f, 1.0f, 3.0f)};
}

// Sums over products of words and four times the levels, and over squares of the latter.
struct MxSums {
  V products, squares;
};

inline MxSums code_mxfp4(const MxValues& x, V bits, Bytes* quads) {
  const Spread sums(Lanes::add(bits, Lanes::all(kMagic)));
  const Bytes shifts = Lanes::low_bytes(Lanes::words(sums.p));
  Ints high = Lanes::zero_ints(), low = high, squares = high;
  for (int t = 0; t < 8; ++t) {
    const Bytes at = Lanes::min_bytes(Lanes::shift_down(x.high[t], shifts), Lanes::all_bytes(31));
    const Bytes quarters = Lanes::look_up<0>(kMxQuarters.of, at);
    high = Lanes::dot_small(high, x.high[t], quarters);
    low = Lanes::dot_small(low, x.low[t], quarters);
    squares = Lanes::dot_small(squares, quarters, quarters);
    quads[t] = Lanes::with_signs(Lanes::look_up<0>(kMxCodes.of, at), x.signs[t]);
  }
  return {Lanes::to_float(high, low), Lanes::to_float(squares)};
}

inline void put_mxfp4(const MxRange& range, const MxValues& x, V by, const MxSums& sums, BlockMXFP4* out,
                      Misses& misses) {
  const V words = Lanes::mul(by, Lanes::all(64.0f * kMxUnits));  // a quarter, under the scale found
  const V gain = Lanes::mul(
      words, Lanes::sub(Lanes::add(sums.products, sums.products), Lanes::mul(words, sums.squares)));
  const V unit = Lanes::mul(range.scale, Lanes::all(1.0f / (256.0f * kMxUnits)));
  const V square = Lanes::mul(unit, unit);
  misses.error = Lanes::fma(square, Lanes::max(Lanes::sub(x.squares, gain), Lanes::all(0.0f)), misses.error);
  misses.total = Lanes::fma(square, x.squares, misses.total);
  float scales[Lanes::kBlocks];
  Lanes::store(scales, Lanes::mul(range.scale, by));
  for (int b = 0; b < Lanes::kBlocks; ++b) {
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
    put_codes(quads, out + g * Lanes::kBlocks);
  }
  for (int g = 0; g < groups; ++g) {
    put_mxfp4(ranges[g], values[g], fits[g].by, sums[g], out + g * Lanes::kBlocks, misses);
  }
}

}  // namespace
}  // namespace millrace::quant::MILLRACE_TARGET
