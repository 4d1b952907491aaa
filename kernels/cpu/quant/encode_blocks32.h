// Encoders of blocks of 32 with an f16 scale (and minimum), a group of blocks at a time: Q8_0, Q4_0, Q5_0,
// Q4_1, Q5_1.
//
// Million values per second of a Neoverse-N1 core, measured (docs/benchmarks.md): q8_0 1,355, q4_0 656, q5_0
// 594, q4_1 481, q5_1 434. All of them are bound by its two vector units, none by memory.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/quant/encode_group.h"
#include "kernels/cpu/quant/group_values.h"
#include "kernels/cpu/quant/search_scale.h"
#include "kernels/cpu/quant/search_scale_min.h"
#include "kernels/cpu/simd/lanes.h"
#include "kernels/quant/blocks.h"

namespace millrace::quant::MILLRACE_TARGET {
namespace {

// Scales in words: as f16 holds them where they are small or large for it, or else as they are.
inline V as_halves_hold(const SignedRange& range, V scale) {
  const V wanted = Lanes::mul(scale, range.unit()), size = Lanes::abs(wanted);
  const Lanes::Mask small = Lanes::greater(Lanes::all(0x1p-10f), size),
                    large = Lanes::greater(size, Lanes::all(kMaxHalf));
  if (!Lanes::any(small) && !Lanes::any(large)) return scale;
  const V held = Lanes::mul(StoredHalves(wanted).value, range.factor);
  return Lanes::select(small, held, Lanes::select(large, held, scale));
}

// Codes are rounded by the scale found, as f16 holds it, and stored with the scale that is best for them.
template <class Block>
inline void put_around_zero(const SignedRange& range, const CodeSums& sums, Block* out, Misses& misses) {
  const V unit = range.unit(), square = Lanes::mul(unit, unit);
  const StoredHalves d(Lanes::mul(Lanes::div(sums.xq, Lanes::max(sums.qq, Lanes::all(1.0f))), unit));
  misses.error = Lanes::fma(square, sums.missed(Lanes::mul(d.value, range.factor)), misses.error);
  misses.total = Lanes::fma(square, sums.xx, misses.total);
  for (int b = 0; b < Lanes::kBlocks; ++b) out[b].d = d.bits[b];
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
    growths[g] =
        growth_of<kBits>(Lanes::div(Lanes::all(65536 >> kBits), Lanes::max(scale, Lanes::all(1.0f))));
  }
  for (int g = 0; g < groups; ++g) {
    Bytes quads[8];
    sums[g] = code_signed<kBits>(fine[g], growths[g], quads);
    put_codes(quads, out + g * Lanes::kBlocks);
  }
  for (int g = 0; g < groups; ++g) put_around_zero(ranges[g], sums[g], out + g * Lanes::kBlocks, misses);
}

// As above: rounded by a line that f16 holds, and stored with the line that is best for the codes.
template <class Block, int kTop>
inline void put_above_min(const MinRange& range, const LineSums& sums, Block* out, Misses& misses) {
  constexpr int kHalf = MinSearch<kTop>::kHalf;
  const V count = Lanes::all(kBlock), one = Lanes::all(1.0f), share = Lanes::all(1.0f / kBlock),
          half = Lanes::all(kHalf), halves = Lanes::all(kHalf * kBlock);
  const V variance = Lanes::max(Lanes::sub(Lanes::mul(count, sums.qq), Lanes::mul(sums.q, sums.q)), one);
  const V slope = Lanes::div(Lanes::sub(Lanes::mul(count, sums.xq), Lanes::mul(sums.x, sums.q)), variance);
  // The minimum first: far from zero f16 holds it less well than the scale, which is then the best with it.
  const V q0 = Lanes::add(sums.q, halves);  // codes from 0
  const V base = Lanes::mul(Lanes::sub(sums.x, Lanes::mul(slope, q0)), share);
  const StoredHalves m(Lanes::fma(base, range.unit, range.middle));
  const V held = Lanes::mul(Lanes::sub(m.value, range.middle), range.per_unit);
  const V xq0 = Lanes::fma(half, sums.x, sums.xq), qq0 = Lanes::fma(half, Lanes::add(sums.q, q0), sums.qq);
  const V scale = Lanes::div(Lanes::sub(xq0, Lanes::mul(held, q0)), Lanes::max(qq0, one));
  const StoredHalves d(Lanes::mul(scale, range.unit));
  const V step = Lanes::mul(d.value, range.per_unit);
  const V off = sums.missed(step, Lanes::fma(half, step, held));
  misses.error = Lanes::fma(Lanes::mul(range.unit, range.unit), off, misses.error);
  misses.total = Lanes::add(misses.total, total_of(range, sums));
  for (int b = 0; b < Lanes::kBlocks; ++b) {
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
    put_codes(quads, out + g * Lanes::kBlocks);
  }
  for (int g = 0; g < groups; ++g) {
    put_above_min<Block, kTop>(ranges[g], sums[g], out + g * Lanes::kBlocks, misses);
  }
}

// kClamp: f16 holds the scale too small, by more than what rounds down to 127.
template <bool kClamp>
inline void code_8_bits(const float* x, V d, V inverses, Bytes* quads, Misses& misses) {
  const Spread inverse(inverses), scale(d);
  const V limit = Lanes::all(127.0f), lowest = Lanes::all(-127.0f), magic = Lanes::all(kMagic);
  for (int t = 0; t < 8; ++t) {
    V sums[kParts];
    for (int p = 0; p < kParts; ++p) {
      const V value = Lanes::load_part(x, kBlock, t, p);
      V y = Lanes::mul(value, inverse.p[p]);
      if (kClamp) y = Lanes::max(Lanes::min(y, limit), lowest);
      sums[p] = Lanes::add(y, magic);
      misses.add(Lanes::sub(value, Lanes::mul(Lanes::sub(sums[p], magic), scale.p[p])), value);
    }
    quads[t] = Lanes::low_bytes(Lanes::words(sums));
  }
}

// At 8 bits the search gains nothing that can be measured: the extreme value takes code 127.
inline void encode_q8_0(const float* x, int groups, BlockQ8_0* out, Misses& misses) {
  V values[kBatch], inverses[kBatch];
  bool clamp = false;
  for (int g = 0; g < groups; ++g) {
    V highest[kParts];
    for (int p = 0; p < kParts; ++p) {
      const float* block = x + g * kGroupElements;
      highest[p] = Lanes::abs(Lanes::load_part(block, kBlock, 0, p));
      for (int t = 1; t < 8; ++t) {
        highest[p] = Lanes::max(highest[p], Lanes::abs(Lanes::load_part(block, kBlock, t, p)));
      }
    }
    const V extreme = Lanes::max_across(highest);
    const StoredHalves d(Lanes::div(extreme, Lanes::all(127.0f)));
    values[g] = d.value;
    inverses[g] = inverse_or_zero(d.value);
    clamp |= Lanes::any(Lanes::greater(extreme, Lanes::mul(d.value, Lanes::all(127.25f))));
    for (int b = 0; b < Lanes::kBlocks; ++b) out[g * Lanes::kBlocks + b].d = d.bits[b];
  }
  for (int g = 0; g < groups; ++g, out += Lanes::kBlocks) {
    const float* block = x + g * kGroupElements;
    Bytes quads[8];
    if (clamp) {
      code_8_bits<true>(block, values[g], inverses[g], quads, misses);
    } else {
      code_8_bits<false>(block, values[g], inverses[g], quads, misses);
    }
    uint8_t* const codes = reinterpret_cast<uint8_t*>(out) + offsetof(BlockQ8_0, q);
    Lanes::store_codes(quads, codes, sizeof(BlockQ8_0));
    Lanes::store_codes(quads + 4, codes + 16, sizeof(BlockQ8_0));
  }
}

}  // namespace
}  // namespace millrace::quant::MILLRACE_TARGET
