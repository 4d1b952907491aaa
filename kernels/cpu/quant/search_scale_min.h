// The search of a scale and a minimum: x ~ scale * q + min, q in [0, top], for every block of a group at once
// (group_values.h).
#pragma once

#include <utility>

#include "kernels/cpu/quant/group_values.h"
#include "kernels/cpu/simd/lanes.h"
#include "kernels/quant/blocks.h"

namespace millrace::quant::MILLRACE_TARGET {
namespace {

// The bytes lie around 0, the block's middle; codes less (top + 1) / 2 are then what a shift leaves.
template <int kTop>
struct MinSearch;
template <>
struct MinSearch<15> {
  static constexpr int kShift = 4, kHalf = 8, kCount = 7, kCountBelowZero = 6, kCountFromZero = 5;
  static constexpr float kEnd = 120.0f;
  static constexpr Rounding kAll[] = {{6, 0, 5},  {6, 0, -2}, {-4, 0, -6}, {6, 0, 1},
                                      {5, 0, -5}, {-4, 0, 6}, {4, 0, 0}};
  // Only for blocks that begin at 0, which cannot have most of those: around that end.
  static constexpr Rounding kFromZero[] = {{5, 0, 4}, {6, 0, 2}, {-6, 0, -2}, {-5, 0, -4}, {-4, 0, -8}};
};
template <>
struct MinSearch<31> {
  static constexpr int kShift = 3, kHalf = 16, kCount = 8, kCountBelowZero = 5, kCountFromZero = 5;
  static constexpr float kEnd = 124.0f;
  static constexpr Rounding kAll[] = {{0, 0, 0},  {0, 0, -3},  {-5, 0, 3}, {7, 0, 2},
                                      {0, 0, -2}, {-5, 0, -3}, {-5, 0, 1}, {6, 0, 0}};
  static constexpr Rounding kFromZero[] = {{6, 0, 2}, {7, 0, 1}, {-7, 0, -1}, {-6, 0, -2}, {-5, 0, -4}};
};

// Where the values of each block lie: value = middle + unit * word, of 1 / unit words to 1.
struct MinRange {
  V low, middle, unit, per_unit;
};

struct MinValues : FineValues<8> {
  V sum_high, minus_mean;  // of the upper bytes
};

// What a rounding's codes come to: a gain of numerator / denominator, and the sums behind it. The denominator
// is the variance but for blocks that begin at 0.
struct Slope {
  V numerator, denominator, covariance, variance, sum_q;
};

inline Slope better_of(const Slope& a, const Slope& b) {
  const Lanes::Mask second =
      Lanes::greater(Lanes::mul(b.numerator, a.denominator), Lanes::mul(a.numerator, b.denominator));
  const auto pick = [&](V x, V y) { return Lanes::select(second, y, x); };
  return {pick(a.numerator, b.numerator), pick(a.denominator, b.denominator),
          pick(a.covariance, b.covariance), pick(a.variance, b.variance), pick(a.sum_q, b.sum_q)};
}

// kNone: no block has to begin at 0 or below. kSome: those in `at_zero` do, and have no values below 0.
// kOnly: for those alone.
enum class Zero { kNone, kSome, kOnly };
struct MinSums {
  Ints sum = Lanes::zero_ints(), squares = sum, products = sum;
};

template <int kTop, int kFirst, int kAdd>
inline void add_above_min(const FineValues<8>& x, int t, MinSums& sums) {
  Bytes start = x.high[t];
  if constexpr (kAdd != 0) start = Lanes::add_saturated(start, Lanes::all_bytes(kAdd));
  const Bytes q = rounded<MinSearch<kTop>::kShift, kFirst, 0>(x.high[t], start);
  sums.sum = Lanes::sum_signed(sums.sum, q);
  sums.squares = Lanes::dot_signed(sums.squares, q, q);
  sums.products = Lanes::dot_signed(sums.products, q, x.high[t]);
}

template <int kTop, Zero kZero>
inline Slope slope_of(const MinSums& sums, const MinValues& x, Lanes::Mask at_zero) {
  using Search = MinSearch<kTop>;
  // The slope of x over q is covariance / variance (both times 32), and takes covariance^2 / variance off the
  // error.
  const V sum_q = Lanes::to_float(sums.sum), share = Lanes::all(-1.0f / kBlock);
  const V qq = Lanes::to_float(sums.squares), xq = Lanes::to_float(sums.products);
  const V covariance = Lanes::fma(x.minus_mean, sum_q, xq);
  const V variance = Lanes::max(Lanes::fma(Lanes::mul(sum_q, share), sum_q, qq), Lanes::all(1.0f / kBlock));
  V numerator = Lanes::mul(covariance, covariance), denominator = variance;
  if constexpr (kZero != Zero::kNone) {
    // Values and codes from 0. A minimum above 0 is not to be had: without one xq^2 / qq is taken off.
    const V count = Lanes::all(kBlock), end = Lanes::all(Search::kEnd), half = Lanes::all(Search::kHalf);
    const V mean_x = Lanes::sub(end, x.minus_mean), sum_c = Lanes::fma(half, count, sum_q);
    const V sum_x = Lanes::mul(mean_x, count);
    const V xc = Lanes::fma(mean_x, sum_c, covariance);
    const V cc = Lanes::fma(half, Lanes::add(sum_q, sum_c), qq);
    const Lanes::Mask above = Lanes::greater(Lanes::mul(sum_x, variance), Lanes::mul(covariance, sum_c));
    const V line = Lanes::fma(Lanes::mul(sum_x, mean_x), variance, numerator), origin = Lanes::mul(xc, xc);
    const V other = kZero == Zero::kOnly ? Lanes::all(0.0f) : numerator;
    numerator = Lanes::select(at_zero, Lanes::select(above, origin, line), other);
    denominator =
        Lanes::select(at_zero, Lanes::select(above, Lanes::max(cc, Lanes::all(1.0f)), variance), denominator);
  }
  return {numerator, denominator, covariance, variance, sum_q};
}

constexpr int kMinAtOnce = 6;  // roundings whose sums fit the registers

template <int kTop, Zero kZero, int kFrom, int... kIndex>
inline void try_above_min(std::integer_sequence<int, kIndex...>, const FineValues<8>& x, MinSums* out) {
  constexpr const Rounding* kTried =
      kZero == Zero::kOnly ? MinSearch<kTop>::kFromZero : MinSearch<kTop>::kAll;
  MinSums sums[sizeof...(kIndex)];
#pragma GCC unroll 1
  for (int t = 0; t < 8; ++t) {
    (add_above_min<kTop, kTried[kFrom + kIndex].first, kTried[kFrom + kIndex].add>(x, t, sums[kIndex]), ...);
  }
  ((out[kFrom + kIndex] = sums[kIndex]), ...);
}

template <int kTop, Zero kZero, int kCount, int kFrom = 0>
inline void try_all_above_min(const FineValues<8>& x, MinSums* sums) {
  if constexpr (kFrom < kCount) {
    constexpr int kSome = kCount - kFrom < kMinAtOnce ? kCount - kFrom : kMinAtOnce;
    try_above_min<kTop, kZero, kFrom>(std::make_integer_sequence<int, kSome>(), x, sums);
    try_all_above_min<kTop, kZero, kCount, kFrom + kSome>(x, sums);
  }
}

template <int kTop, Zero kZero, int kCount>
inline Slope best_slope(const MinValues& x, Lanes::Mask at_zero) {
  MinSums sums[kCount];
  try_all_above_min<kTop, kZero, kCount>(x, sums);
  return best_of<kCount, Slope>([&](int i) { return slope_of<kTop, kZero>(sums[i], x, at_zero); });
}

// Where some blocks begin at 0, which is seldom: those, and with roundings of their own.
template <int kTop, int kCount>
__attribute__((noinline)) Slope best_slope_with_zeros(const MinValues& x, Lanes::Mask at_zero) {
  return better_of(best_slope<kTop, Zero::kSome, kCount>(x, at_zero),
                   best_slope<kTop, Zero::kOnly, MinSearch<kTop>::kCountFromZero>(x, at_zero));
}

template <int kTop, bool kBelowZero>
inline Slope search_above_min(const MinValues& x, V low) {  // low: at most 0, if kBelowZero
  using Search = MinSearch<kTop>;
  constexpr int kCount = kBelowZero ? Search::kCountBelowZero : Search::kCount;
  const Lanes::Mask at_zero = Lanes::greater(low, Lanes::all(-kLeastRange));
  if (kBelowZero && Lanes::any(at_zero)) return best_slope_with_zeros<kTop, kCount>(x, at_zero);
  return best_slope<kTop, Zero::kNone, kCount>(x, at_zero);
}

// kBelowZero: the minimum may not be above 0 (the K types subtract theirs).
template <int kTop, bool kBelowZero, int kStride>
inline MinRange min_range(const float* x) {
  const V zero = Lanes::all(0.0f), half = Lanes::all(0.5f);
  V low, high;
  find_ends<8, kStride>(x, low, high);
  if (kBelowZero) low = Lanes::min(low, zero);
  // Halved first: the largest numbers' difference is none.
  low = Lanes::mul(low, half);
  high = Lanes::mul(high, half);
  const V reach = Lanes::sub(high, low);
  constexpr float kWords = 256.0f * MinSearch<kTop>::kEnd;
  return {low, Lanes::add(high, low), Lanes::mul(reach, Lanes::all(1.0f / kWords)),
          Lanes::mul(inverse_or_zero(reach), Lanes::all(kWords))};
}

// The line found, and sums over the codes (from 0) it was found with and the values.
struct MinFit {
  V scale, min;
  V sum_c, cc, mean_x, xc;
};

template <int kStride>
inline void set_min_values(const float* x, const MinRange& range, MinValues& fine) {
  const V from =
      Lanes::fma(Lanes::sub(Lanes::all(0.0f), range.middle), range.per_unit, Lanes::all(kMagic + kWordBias));
  const Spread factor(range.per_unit), plus(from);
  Ints sum = Lanes::zero_ints();
  for (int t = 0; t < 8; ++t) {
    V sums[kParts];
    for (int p = 0; p < kParts; ++p) {
      sums[p] = Lanes::fma(Lanes::load_part(x, kStride, t, p), factor.p[p], plus.p[p]);
    }
    fine.set(t, sums);
    sum = Lanes::sum_signed(sum, fine.high[t]);
  }
  fine.sum_high = Lanes::to_float(sum);
  fine.minus_mean = Lanes::mul(fine.sum_high, Lanes::all(-1.0f / kBlock));
}

template <int kTop, bool kBelowZero>
inline MinFit fit_above_min(const MinRange& range, const MinValues& fine, const Slope& best) {
  const V share = Lanes::all(1.0f / kBlock), step = Lanes::mul(range.unit, Lanes::all(256.0f));
  MinFit fit;
  fit.sum_c = Lanes::fma(Lanes::all(MinSearch<kTop>::kHalf), Lanes::all(kBlock), best.sum_q);
  const V mean_c = Lanes::mul(fit.sum_c, share);
  fit.cc = Lanes::fma(mean_c, fit.sum_c, best.variance);
  fit.mean_x = Lanes::sub(range.middle, Lanes::mul(fine.minus_mean, step));
  fit.xc = Lanes::fma(fit.mean_x, fit.sum_c, Lanes::mul(best.covariance, step));
  fit.scale = Lanes::mul(Lanes::div(best.covariance, best.variance), step);
  fit.min = Lanes::sub(fit.mean_x, Lanes::mul(fit.scale, mean_c));
  if (kBelowZero) {
    // Without a minimum the scale is sum x q / sum q q.
    const V zero = Lanes::all(0.0f);
    const Lanes::Mask above = Lanes::greater(fit.min, zero);
    if (Lanes::any(above)) {
      fit.scale = Lanes::select(above, Lanes::div(fit.xc, Lanes::max(fit.cc, Lanes::all(1.0f))), fit.scale);
      fit.min = Lanes::select(above, zero, fit.min);
    }
  }
  return fit;
}

// Sums over a block's values and codes, of codes less half.
struct LineSums {
  V xx, x, xq, q, qq;

  // Of (x - scale q - base)^2.
  V missed(V scale, V base) const {
    const V count = Lanes::all(kBlock), line = Lanes::add(base, base);
    const V of_x = Lanes::fma(Lanes::add(scale, scale), xq, Lanes::mul(line, x));
    const V of_q = Lanes::mul(scale, Lanes::fma(line, q, Lanes::mul(scale, qq)));
    const V squares = Lanes::fma(Lanes::mul(base, base), count, Lanes::add(xx, of_q));
    return Lanes::max(Lanes::sub(squares, of_x), Lanes::all(0.0f));
  }
};

// How words become codes less half, in their upper bits: `times` as large and `up`, all of that halved, since
// what is moved down may have been larger than a word.
struct Line {
  Words times, up;
};

// For x ~ scale * q + base. A block of scale 0 has the code 0 alone.
template <int kTop>
inline Line line_to_codes(const MinRange& range, V scale, V base) {
  constexpr int kShift = MinSearch<kTop>::kShift;
  const V zero = Lanes::all(0.0f), lowest = Lanes::all(-32768.0f);
  const Lanes::Mask some = Lanes::greater(scale, Lanes::all(kLeastRange));
  const V steps = Lanes::div(Lanes::all(128 << kShift), Lanes::select(some, scale, Lanes::all(1.0f)));
  const V times = Lanes::mul(range.unit, steps);  // halved, as all from here
  const V half_step = Lanes::fma(times, Lanes::all(-kWordBias), Lanes::all((64 << kShift) - 16384));
  const V up = Lanes::fma(Lanes::sub(range.middle, base), steps, half_step);
  return {block_words(Lanes::select(some, Lanes::mul(times, Lanes::all(32768.0f)), zero)),
          block_words(Lanes::select(some, up, lowest))};
}

// Codes from 0.
template <int kTop>
inline LineSums code_line(const MinValues& x, const Line& line, Bytes* quads) {
  constexpr int kShift = MinSearch<kTop>::kShift;
  const Bytes half = Lanes::all_bytes(128 >> kShift);
  const Ints zero = Lanes::zero_ints();
  Ints high = zero, low = zero, sum_low = zero, sum = zero, squares = zero;
  for (int t = 0; t < 8; ++t) {
    const Words halves = Lanes::fma(x.word[t], line.times, line.up);
    const Bytes q = Lanes::shift<kShift>(Lanes::high_bytes(Lanes::add_saturated(halves, halves)));
    high = Lanes::dot_signed(high, q, x.high[t]);
    low = Lanes::dot_signed(low, x.low[t], q);
    sum_low = Lanes::sum_signed(sum_low, x.low[t]);
    sum = Lanes::sum_signed(sum, q);
    squares = Lanes::dot_signed(squares, q, q);
    quads[t] = Lanes::add_saturated(q, half);
  }
  return {squares_of(x), Lanes::fma(x.sum_high, Lanes::all(256.0f), Lanes::to_float(sum_low)),
          Lanes::to_float(high, low), Lanes::to_float(sum), Lanes::to_float(squares)};
}

// What the values of blocks add up to, squared: of middle + unit * word.
inline V total_of(const MinRange& range, const LineSums& sums) {
  const V twice = Lanes::add(range.middle, range.middle), middles = Lanes::mul(range.middle, range.middle);
  const V words = Lanes::mul(range.unit, Lanes::fma(range.unit, sums.xx, Lanes::mul(twice, sums.x)));
  return Lanes::fma(middles, Lanes::all(kBlock), words);
}

}  // namespace
}  // namespace millrace::quant::MILLRACE_TARGET
