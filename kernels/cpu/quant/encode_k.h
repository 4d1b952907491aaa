// Encoders of the K types: sub-blocks with small integer scales (and minimums) over one f16 scale of 256
// values. Every sub-block is first fitted on its own; then the integers are chosen, the super-block's own
// scales are solved for given those and the codes found, and codes are rounded by what has come of it.
//
// A group is here the same sub-block of kBlocks super-blocks: what a super-block sums over its sub-blocks is
// then a sum over groups, and never one across a vector.
//
// Million values per second of a Neoverse-N1 core, measured (docs/benchmarks.md): q5_k 560, q4_k 528, q6_k
// 504.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <cstring>

#include "kernels/cpu/quant/encode_group.h"
#include "kernels/cpu/quant/encode_table.h"
#include "kernels/cpu/quant/group_values.h"
#include "kernels/cpu/quant/search_scale.h"
#include "kernels/cpu/quant/search_scale_min.h"
#include "kernels/cpu/simd/lanes.h"
#include "kernels/quant/blocks.h"

namespace millrace::quant::MILLRACE_TARGET {
namespace {

constexpr float kMaxScale = 63.0f;  // of Q4_K and Q5_K: six bits
constexpr int kSubs = 8;            // their sub-blocks of 32

// The numbers of kBlocks super-blocks: integers 0..63 of each sub-block, and what they count.
struct ScalesAndMins {
  V scale[kSubs], min[kSubs];
  V d, dmin;

  V scales(int s) const { return Lanes::mul(scale[s], d); }
  V mins(int s) const { return Lanes::mul(min[s], dmin); }
  V bases(int s) const { return Lanes::sub(Lanes::all(0.0f), mins(s)); }
};

inline V to_integers(V x, V unit) {
  const V zero = Lanes::all(0.0f), magic = Lanes::all(kMagic);
  return Lanes::sub(
      Lanes::add(Lanes::min(Lanes::max(Lanes::mul(x, unit), zero), Lanes::all(kMaxScale)), magic), magic);
}

// The fits of single sub-blocks in integers. Scales first; then each minimum so that the codes found leave
// nothing over on average, under the scale that has become of it: that takes back most of what its rounding
// costs. Then d and dmin of the super-block by least squares over all 256 values, as d (scale q) - dmin
// (min).
inline void solve(const MinFit* fits, ScalesAndMins& k) {
  const V zero = Lanes::all(0.0f), one = Lanes::all(1.0f), count = Lanes::all(kBlock),
          share = Lanes::all(1.0f / kMaxScale);
  V max_scale = zero, max_below = zero;
  for (int s = 0; s < kSubs; ++s) {
    max_scale = Lanes::max(max_scale, fits[s].scale);
    max_below = Lanes::max(max_below, Lanes::sub(zero, fits[s].min));
  }
  k.d = StoredHalves(Lanes::mul(max_scale, share)).value;
  k.dmin = StoredHalves(Lanes::mul(max_below, share)).value;
  const V per_scale = inverse_or_zero(k.d), per_min = inverse_or_zero(k.dmin);
  V aa = zero, ab = zero, bb = zero, ra = zero, rb = zero;
  for (int s = 0; s < kSubs; ++s) {
    const MinFit& fit = fits[s];
    k.scale[s] = to_integers(fit.scale, per_scale);
    const V scale = k.scales(s), levels = Lanes::mul(scale, fit.sum_c);
    k.min[s] =
        to_integers(Lanes::fma(levels, Lanes::all(1.0f / kBlock), Lanes::sub(zero, fit.mean_x)), per_min);
    // What is left over: its sum, and the sum of its products with the codes.
    const V min = k.mins(s), rest = Lanes::fma(Lanes::add(fit.mean_x, min), count, Lanes::sub(zero, levels));
    const V products = Lanes::sub(Lanes::fma(min, fit.sum_c, fit.xc), Lanes::mul(scale, fit.cc));
    const V a = k.scale[s], b = Lanes::sub(zero, k.min[s]);
    aa = Lanes::fma(Lanes::mul(a, a), fit.cc, aa);
    ab = Lanes::fma(Lanes::mul(a, b), fit.sum_c, ab);
    bb = Lanes::fma(Lanes::mul(b, b), count, bb);
    ra = Lanes::fma(a, products, ra);
    rb = Lanes::fma(b, rest, rb);
  }
  const V all = Lanes::mul(aa, bb), det = Lanes::sub(all, Lanes::mul(ab, ab));
  const Lanes::Mask both = Lanes::greater(det, Lanes::mul(all, Lanes::all(1e-5f)));
  const V inverse = Lanes::div(one, Lanes::select(both, det, Lanes::max(aa, one)));
  const V more_d = Lanes::select(both, Lanes::sub(Lanes::mul(ra, bb), Lanes::mul(rb, ab)), ra);
  const V more_min = Lanes::select(both, Lanes::sub(Lanes::mul(rb, aa), Lanes::mul(ra, ab)), zero);
  const V d = Lanes::fma(more_d, inverse, k.d), dmin = Lanes::fma(more_min, inverse, k.dmin);
  // Neither may turn negative: then both stay. No comparison with what is not a number is true.
  const V good_d = StoredHalves(d).value, good_min = StoredHalves(Lanes::max(dmin, zero)).value;
  const Lanes::Mask up = Lanes::greater(d, zero), level = Lanes::greater(dmin, Lanes::all(-kLeastRange));
  k.d = Lanes::select(up, Lanes::select(level, good_d, k.d), k.d);
  k.dmin = Lanes::select(up, Lanes::select(level, good_min, k.dmin), k.dmin);
}

// What the codes of sub-blocks miss.
template <int kTop>
inline void count_misses(const MinRange& range, const LineSums& sums, V scale, V base, Misses& misses) {
  const V step = Lanes::mul(scale, range.per_unit), below = Lanes::sub(base, range.middle);
  const V middle = Lanes::fma(step, Lanes::all(MinSearch<kTop>::kHalf), Lanes::mul(below, range.per_unit));
  misses.error = Lanes::fma(Lanes::mul(range.unit, range.unit), sums.missed(step, middle), misses.error);
  misses.total = Lanes::add(misses.total, total_of(range, sums));
}

// The mirror of scale_min_k4.
inline void pack_scales(const uint8_t* scale, const uint8_t* min, uint8_t* scales) {
  for (int s = 0; s < 4; ++s) {
    scales[s] = static_cast<uint8_t>(scale[s] | scale[s + 4] >> 4 << 6);
    scales[s + 4] = static_cast<uint8_t>(min[s] | min[s + 4] >> 4 << 6);
    scales[s + 8] = static_cast<uint8_t>((scale[s + 4] & 15) | (min[s + 4] & 15) << 4);
  }
}

template <class Block>
inline void put_scales(const ScalesAndMins& k, Block* out) {
  float scale[kSubs][Lanes::kBlocks], min[kSubs][Lanes::kBlocks];
  for (int s = 0; s < kSubs; ++s) {
    Lanes::store(scale[s], k.scale[s]);
    Lanes::store(min[s], k.min[s]);
  }
  const StoredHalves d(k.d), dmin(k.dmin);
  for (int b = 0; b < Lanes::kBlocks; ++b) {
    uint8_t scales[kSubs], mins[kSubs];
    for (int s = 0; s < kSubs; ++s) {
      scales[s] = static_cast<uint8_t>(scale[s][b]);
      mins[s] = static_cast<uint8_t>(min[s][b]);
    }
    out[b].d = d.bits[b];
    out[b].dmin = dmin.bits[b];
    pack_scales(scales, mins, out[b].scales);
  }
}

// quads [8 sub-blocks][8]
template <class Block, int kTop>
inline void put_super_codes(const Bytes (*quads)[8], Block* out) {
  auto* const bytes = reinterpret_cast<uint8_t*>(out);
  for (int r = 0; r < 4; ++r) {
    for (int half = 0; half < 2; ++half) {
      Bytes pairs[4];
      for (int t = 0; t < 4; ++t) {
        const Bytes low = quads[2 * r][4 * half + t], high = quads[2 * r + 1][4 * half + t];
        pairs[t] = kTop == 15 ? Lanes::nibbles(low, high)
                              : Lanes::nibbles(Lanes::and_bytes(low, 15), Lanes::and_bytes(high, 15));
      }
      Lanes::store_codes(pairs, bytes + offsetof(Block, q) + 32 * r + 16 * half, sizeof(Block));
    }
  }
  if constexpr (kTop == 31) {
    for (int half = 0; half < 2; ++half) {
      Bytes bits[4];
      for (int t = 0; t < 4; ++t) {
        const auto fifth = [&](int s) { return Lanes::and_bytes(quads[s][4 * half + t], 16); };
        // The fifth bits of 0 .. 3 move down, those of 4 .. 7 up.
        const Bytes low =
            Lanes::or_bytes(Lanes::or_bytes(Lanes::shift<4>(fifth(0)), Lanes::shift<3>(fifth(1))),
                            Lanes::or_bytes(Lanes::shift<2>(fifth(2)), Lanes::shift<1>(fifth(3))));
        const Bytes high =
            Lanes::or_bytes(Lanes::or_bytes(Lanes::shift<4>(fifth(4)), Lanes::shift<3>(fifth(5))),
                            Lanes::or_bytes(Lanes::shift<2>(fifth(6)), Lanes::shift<1>(fifth(7))));
        bits[t] = Lanes::nibbles(low, high);
      }
      Lanes::store_codes(bits, bytes + offsetof(Block, high) + 16 * half, sizeof(Block));
    }
  }
}

template <class Block, int kTop>
inline void encode_with_mins(const float* x, Block* out, Misses& misses) {
  MinRange ranges[kSubs];
  MinFit fits[kSubs];
  ScalesAndMins k;
  MinValues fine[kSubs];
  Slope slopes[kSubs];
  Line lines[kSubs];
  LineSums sums[kSubs];
  Bytes quads[kSubs][8];
  for (int s = 0; s < kSubs; ++s) ranges[s] = min_range<kTop, true, kSuperBlock>(x + s * kBlock);
  for (int s = 0; s < kSubs; ++s) {
    set_min_values<kSuperBlock>(x + s * kBlock, ranges[s], fine[s]);
    slopes[s] = search_above_min<kTop, true>(fine[s], ranges[s].low);
  }
  for (int s = 0; s < kSubs; ++s) fits[s] = fit_above_min<kTop, true>(ranges[s], fine[s], slopes[s]);
  solve(fits, k);
  for (int s = 0; s < kSubs; ++s) lines[s] = line_to_codes<kTop>(ranges[s], k.scales(s), k.bases(s));
  for (int s = 0; s < kSubs; ++s) sums[s] = code_line<kTop>(fine[s], lines[s], quads[s]);
  for (int s = 0; s < kSubs; ++s) count_misses<kTop>(ranges[s], sums[s], k.scales(s), k.bases(s), misses);
  put_scales(k, out);
  put_super_codes<Block, kTop>(quads, out);
}

// ---------------------------------------------------------------- signed scales: Q6_K

constexpr int kSixSubs = 16, kSixBlock = 16;  // sub-blocks of 16

// quads [16 sub-blocks][4]; sub-block 8 h + 2 r + j has the elements 16 j of run r of half h.
inline void put_six_bits(const Bytes (*quads)[4], BlockQ6_K* out) {
  auto* const bytes = reinterpret_cast<uint8_t*>(out);
  for (int h = 0; h < 2; ++h) {
    for (int j = 0; j < 2; ++j) {
      const auto run = [&](int r, int t) { return quads[8 * h + 2 * r + j][t]; };
      const auto low = [&](int r, int t) { return Lanes::and_bytes(run(r, t), 15); };
      const auto high = [&](int r, int t) { return Lanes::shift<4>(run(r, t)); };
      Bytes first[4], second[4], upper[4];
      for (int t = 0; t < 4; ++t) {
        first[t] = Lanes::nibbles(low(0, t), low(2, t));
        second[t] = Lanes::nibbles(low(1, t), low(3, t));
        // Two bits of each run: those of 1 and 3 are still where the others' are not.
        const Bytes even = Lanes::nibbles(high(0, t), high(2, t));
        const Bytes odd = Lanes::nibbles(Lanes::and_bytes(Lanes::shift<2>(run(1, t)), 12),
                                         Lanes::and_bytes(Lanes::shift<2>(run(3, t)), 12));
        upper[t] = Lanes::or_bytes(even, odd);
      }
      Lanes::store_codes(first, bytes + offsetof(BlockQ6_K, low) + 64 * h + 16 * j, sizeof(BlockQ6_K));
      Lanes::store_codes(second, bytes + offsetof(BlockQ6_K, low) + 64 * h + 32 + 16 * j, sizeof(BlockQ6_K));
      Lanes::store_codes(upper, bytes + offsetof(BlockQ6_K, high) + 32 * h + 16 * j, sizeof(BlockQ6_K));
    }
  }
}

// Every sub-block on its own, its scale then as an integer times d, codes by those; d again by least squares
// over the codes, which stay. A sub-block of scale 0 has codes of 0.
inline void encode_q6_k(const float* x, BlockQ6_K* out, Misses& misses) {
  const V zero = Lanes::all(0.0f), one = Lanes::all(1.0f);
  SignedRange ranges[kSixSubs];
  FineValues<4> fine[kSixSubs];
  V scale[kSixSubs], highest = zero, products = zero, squares = zero;
  Growth growths[kSixSubs];
  CodeSums sums[kSixSubs];
  Bytes quads[kSixSubs][4];
  for (int s = 0; s < kSixSubs; ++s) ranges[s] = signed_range<4, kSuperBlock>(x + s * kSixBlock);
  for (int s = 0; s < kSixSubs; ++s) {
    const V words = fit_signed<6, 4, kSuperBlock>(x + s * kSixBlock, ranges[s], fine[s]);
    scale[s] = Lanes::mul(words, ranges[s].unit());
    highest = Lanes::max(highest, Lanes::abs(scale[s]));
  }
  const V first = StoredHalves(Lanes::mul(highest, Lanes::all(1.0f / 127.0f))).value,
          per_d = inverse_or_zero(first);
  for (int s = 0; s < kSixSubs; ++s) {
    const V wanted = Lanes::mul(scale[s], per_d), unit = ranges[s].unit();
    scale[s] = Lanes::round(Lanes::max(Lanes::min(wanted, Lanes::all(127.0f)), Lanes::all(-128.0f)));
    const V steps = inverse_or_zero(Lanes::mul(scale[s], first));
    growths[s] = growth_of<6>(Lanes::mul(Lanes::mul(unit, steps), Lanes::all(1024.0f)));
  }
  for (int s = 0; s < kSixSubs; ++s) {
    sums[s] = code_signed<6>(fine[s], growths[s], quads[s]);
    const V unit = ranges[s].unit();
    products = Lanes::fma(Lanes::mul(scale[s], unit), sums[s].xq, products);
    squares = Lanes::fma(Lanes::mul(scale[s], scale[s]), sums[s].qq, squares);
  }
  // d stays above 0.
  const V wanted = Lanes::div(products, Lanes::max(squares, one));
  const StoredHalves d(Lanes::select(Lanes::greater(wanted, zero), wanted, first));
  float scales[kSixSubs][Lanes::kBlocks];
  for (int s = 0; s < kSixSubs; ++s) {
    const V unit = ranges[s].unit(), square = Lanes::mul(unit, unit);
    const V step = Lanes::mul(Lanes::mul(scale[s], d.value), ranges[s].factor);
    misses.error = Lanes::fma(square, sums[s].missed(step), misses.error);
    misses.total = Lanes::fma(square, sums[s].xx, misses.total);
    Lanes::store(scales[s], scale[s]);
  }
  for (int b = 0; b < Lanes::kBlocks; ++b) {
    out[b].d = d.bits[b];
    for (int s = 0; s < kSixSubs; ++s) out[b].scales[s] = static_cast<int8_t>(scales[s][b]);
  }
  put_six_bits(quads, out);
}

// Hands kBlocks super-blocks at a time to `encode`, the last ones filled up with zeros.
template <class Block, void (*kEncode)(const float*, Block*, Misses&)>
EncodeSums encode_super_blocks(const float* x, int64_t blocks, uint8_t* out) {
  constexpr int kGroup = Lanes::kBlocks;
  Misses misses;
  int64_t done = 0;
  for (; done + kGroup <= blocks; done += kGroup) {
    kEncode(x + done * kSuperBlock,
            reinterpret_cast<Block*>(out + done * static_cast<int64_t>(sizeof(Block))), misses);
  }
  if (done < blocks) {
    const auto count = static_cast<size_t>(blocks - done);
    float padded[kGroup * kSuperBlock] = {};
    Block last[kGroup];
    std::memcpy(padded, x + done * kSuperBlock, count * kSuperBlock * sizeof(float));
    kEncode(padded, last, misses);
    std::memcpy(out + done * static_cast<int64_t>(sizeof(Block)), last, count * sizeof(Block));
  }
  return misses.sums();
}

}  // namespace
}  // namespace millrace::quant::MILLRACE_TARGET
