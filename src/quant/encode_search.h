// Which scale (and minimum) makes the codes of a block differ least from its values, for every block of a
// group at once. Included inside the anonymous namespace of the encoders' tables, after Simd.
//
// A rounding to codes is fixed by an inverse scale (and an offset); once the codes are known the best scale
// (and minimum) for them is a least-squares problem with a closed solution, and so is its error. Each search
// tries some roundings and keeps the one of least error. It runs on the values rounded to bytes between the
// block's ends (a step of a 4-bit type is 16 of them): sixteen or thirty-two values per instruction, products
// that dot product instructions add up, and sums that are exact and so the same everywhere. Codes are always
// rounded from the values themselves, once the scale is found.
//
// The roundings tried were picked one by one, each for what it takes off the error of Gaussian blocks and of
// heavy-tailed ones (Student's t, 4 degrees) beside those before it.
#pragma once

using V = Simd::V;
using Bytes = Simd::Bytes;
using Ints = Simd::Ints;
constexpr int kParts = 4;

// Below this a block's range is none: no scale of f16 is that small, and its inverse stays finite.
constexpr float kLeastRange = 1e-30f, kMostRange = 3e38f;

// A number per block, spread over the parts.
struct Spread {
  V p[kParts];
  explicit Spread(V x) : p{Simd::spread<0>(x), Simd::spread<1>(x), Simd::spread<2>(x), Simd::spread<3>(x)} {}
};

inline V inverse_or_zero(V x) {
  const V zero = Simd::all(0.0f);
  const Simd::Mask good = Simd::greater(Simd::abs(x), Simd::all(kLeastRange));
  return Simd::select(good, Simd::div(Simd::all(1.0f), Simd::select(good, x, Simd::all(1.0f))), zero);
}

// Least and largest value of each block of kQuads * 4 elements.
template <int kQuads>
inline void find_ends(const float* x, V& low, V& high) {
  V least[kParts], most[kParts];
  for (int p = 0; p < kParts; ++p) {
    least[p] = most[p] = Simd::load_part(x, 4 * kQuads, 0, p);
    for (int t = 1; t < kQuads; ++t) {
      const V v = Simd::load_part(x, 4 * kQuads, t, p);
      least[p] = Simd::min(least[p], v);
      most[p] = Simd::max(most[p], v);
    }
  }
  low = Simd::min_across(least);
  high = Simd::max_across(most);
}

// The end further from zero: 0 for a block of zeros.
inline V extreme_of(V low, V high) {
  return Simd::select(Simd::greater(high, Simd::sub(Simd::all(0.0f), low)), high, low);
}

// ---------------------------------------------------------------- x ~ scale * q, q in [-half, half - 1]

// The two scales that take most off the error.
struct BestTwo {
  V gain, scale, next_gain, next_scale;
};

// Values between -127 and 127 times kFactor / 2^kShift.
template <int kQuads, int kHalf, int kShift, int kFactor>
inline void try_signed(const Bytes* x8, BestTwo& best) {
  Ints xq = Simd::zero_ints(), qq = xq;
  for (int t = 0; t < kQuads; ++t) {
    const Bytes q = Simd::signed_codes<kShift>(x8[t], kFactor, kHalf);
    xq = Simd::dot_signed(xq, q, x8[t]);
    qq = Simd::dot_signed(qq, q, q);
  }
  // sum (x - s q)^2 is least at s = xq / qq, and is then xx - xq^2 / qq: the largest xq^2 / qq wins.
  const V product = Simd::to_float(xq);
  const V scale = Simd::div(product, Simd::max(Simd::to_float(qq), Simd::all(1.0f)));
  const V gain = Simd::mul(scale, product);
  const Simd::Mask better = Simd::greater(gain, best.gain), next = Simd::greater(gain, best.next_gain);
  best.next_gain = Simd::select(better, best.gain, Simd::select(next, gain, best.next_gain));
  best.next_scale = Simd::select(better, best.scale, Simd::select(next, scale, best.next_scale));
  best.gain = Simd::select(better, gain, best.gain);
  best.scale = Simd::select(better, scale, best.scale);
}

// Blocks of kQuads * 4. The scales have the sign that gives the extreme value the code -half.
template <int kQuads, int kHalf, int kShift, int... kFactors>
inline BestTwo fit_signed(const float* x) {
  constexpr int kStride = 4 * kQuads;
  V low, high;
  find_ends<kQuads>(x, low, high);
  const V extreme = extreme_of(low, high);
  const Spread factor(Simd::mul(inverse_or_zero(extreme), Simd::all(-127.0f)));
  Bytes x8[kQuads];
  for (int t = 0; t < kQuads; ++t) {
    V scaled[kParts];
    for (int p = 0; p < kParts; ++p) scaled[p] = Simd::mul(Simd::load_part(x, kStride, t, p), factor.p[p]);
    x8[t] = Simd::to_signed(scaled);
  }
  const V zero = Simd::all(0.0f);
  BestTwo best = {zero, zero, zero, zero};
  (try_signed<kQuads, kHalf, kShift, kFactors>(x8, best), ...);
  const V unit = Simd::mul(extreme, Simd::all(-1.0f / 127.0f));
  best.scale = Simd::mul(best.scale, unit);
  best.next_scale = Simd::mul(best.next_scale, unit);
  return best;
}

// The best scale for the codes that `scale` brings, and what it takes off the error.
template <int kQuads>
inline V refit_signed(const float* x, V scale, float half, V& gain) {
  const V least = Simd::all(-half), most = Simd::all(half - 1.0f), zero = Simd::all(0.0f);
  const Spread inverse(inverse_or_zero(scale));
  V yq[kParts], qq[kParts];
  for (int p = 0; p < kParts; ++p) {
    yq[p] = qq[p] = zero;
    for (int t = 0; t < kQuads; ++t) {
      const V y = Simd::mul(Simd::load_part(x, 4 * kQuads, t, p), inverse.p[p]);
      const V q = Simd::round(Simd::min(Simd::max(y, least), most));
      yq[p] = Simd::fma(y, q, yq[p]);
      qq[p] = Simd::fma(q, q, qq[p]);
    }
  }
  const V product = Simd::add_across(yq), sum = Simd::add_across(qq);  // at least 1 unless every code is 0
  const V ratio = Simd::div(product, Simd::max(sum, Simd::all(1.0f)));
  gain = Simd::mul(Simd::mul(ratio, product), Simd::mul(scale, scale));
  return Simd::select(Simd::greater(sum, zero), Simd::mul(scale, ratio), scale);
}

// In four bits a byte's rounding blurs which of the two is better: both are solved for in float.
inline V fit_4_bits(const float* x) {
  const BestTwo best = fit_signed<8, 8, 10, 66, 70, 58, 63, 68, 55, 73, 49, 65, 61>(x);
  V gain, next_gain;
  const V scale = refit_signed<8>(x, best.scale, 8.0f, gain);
  const V next_scale = refit_signed<8>(x, best.next_scale, 8.0f, next_gain);
  return Simd::select(Simd::greater(next_gain, gain), next_scale, scale);
}
inline V fit_5_bits(const float* x) {
  V gain;
  return refit_signed<8>(x, fit_signed<8, 16, 9, 65, 61, 67, 57, 63, 60, 53, 66>(x).scale, 16.0f, gain);
}
inline V fit_6_bits(const float* x) { return fit_signed<4, 32, 8, 65, 63, 61, 58, 57, 64, 62, 52>(x).scale; }

// ---------------------------------------------------------------- x ~ scale * q + min, q in [0, top]

struct ScaleMin {
  V scale, min;
};

struct BestMin {
  V gain, covariance, variance, sum_q;
};

// A rounding of bytes: (x8 - offset) * factor / 2^shift.
struct Rounding {
  int offset, factor;
};
// For codes up to 15 and 31.
constexpr int kShift15 = 11, kShift31 = 10;
constexpr Rounding kRoundings15[] = {{2, 123}, {8, 123}, {0, 124}, {2, 114},
                                     {4, 122}, {0, 126}, {8, 127}, {6, 115}};
constexpr Rounding kRoundings31[] = {{1, 125}, {2, 122}, {0, 126}, {3, 125}, {1, 117},
                                     {0, 122}, {1, 120}, {0, 125}, {2, 125}, {0, 118}};
template <int kTop>
constexpr int kNumRoundings = kTop == 15 ? 8 : 10;
// Only for blocks that begin at 0, which cannot have most of those.
constexpr Rounding kFromZero15[] = {{0, 114}, {0, 117}, {0, 120}, {0, 122}, {0, 128}, {0, 130}};
constexpr Rounding kFromZero31[] = {{0, 118}, {0, 120}, {0, 121}, {0, 123}, {0, 124}, {0, 128}};
constexpr int kNumFromZero = 6;

// kZero: the rounding is for blocks that may not begin above 0; of them those in `at_zero` begin there.
enum class Zero { kNone, kSome, kOnly };
template <int kTop, int kOffset, int kFactor, Zero kZero>
inline void try_above_min(const Bytes* x8, V sum_x, Simd::Mask at_zero, BestMin& best) {
  constexpr int kShift = kTop == 15 ? kShift15 : kShift31;
  Ints sum = Simd::zero_ints(), squares = sum, products = sum;
  for (int t = 0; t < 8; ++t) {
    const Bytes q = Simd::unsigned_codes<kShift>(Simd::minus<kOffset>(x8[t]), kFactor, kTop);
    sum = Simd::add_bytes(sum, q);
    squares = Simd::dot_unsigned(squares, q, q);
    products = Simd::dot_unsigned(products, x8[t], q);
  }
  // The slope of x over q is covariance / variance (both times 32^2), and takes covariance^2 / variance off
  // the error. Below 2^24 each: exact.
  const V sum_q = Simd::to_float(sum), count = Simd::all(32.0f), one = Simd::all(1.0f);
  const V qq = Simd::to_float(squares), xq = Simd::to_float(products);
  const V covariance = Simd::sub(Simd::mul(count, xq), Simd::mul(sum_x, sum_q));
  const V variance = Simd::max(Simd::sub(Simd::mul(count, qq), Simd::mul(sum_q, sum_q)), one);
  V gain = Simd::div(Simd::mul(covariance, covariance), variance);
  if (kZero != Zero::kNone) {
    // A minimum above 0 is not to be had: without one xq^2 / qq is taken off.
    const V line = Simd::fma(sum_x, sum_x, gain);
    const V origin = Simd::div(Simd::mul(Simd::mul(xq, xq), count), Simd::max(qq, one));
    const Simd::Mask above = Simd::greater(Simd::mul(sum_x, variance), Simd::mul(covariance, sum_q));
    gain = Simd::select(at_zero, Simd::select(above, origin, line), kZero == Zero::kOnly ? best.gain : gain);
  }
  const Simd::Mask better = Simd::greater(gain, best.gain);
  best = {Simd::select(better, gain, best.gain), Simd::select(better, covariance, best.covariance),
          Simd::select(better, variance, best.variance), Simd::select(better, sum_q, best.sum_q)};
}

template <int kTop, Zero kZero, int... kIndex>
inline void search_above_min(std::integer_sequence<int, kIndex...>, const Bytes* x8, V sum_x,
                             Simd::Mask at_zero, BestMin& best) {
  constexpr const Rounding* kTried = kZero == Zero::kOnly ? (kTop == 15 ? kFromZero15 : kFromZero31)
                                                          : (kTop == 15 ? kRoundings15 : kRoundings31);
  (try_above_min<kTop, kTried[kIndex].offset, kTried[kIndex].factor, kZero>(x8, sum_x, at_zero, best), ...);
}

template <int kTop, bool kBelowZero>
inline BestMin search_above_min(const Bytes* x8, V sum_x, V low) {
  constexpr std::make_integer_sequence<int, kNumRoundings<kTop>> kAll;
  const Simd::Mask at_zero = Simd::greater(low, Simd::all(-kLeastRange));
  BestMin best = {Simd::all(-1.0f), Simd::all(0.0f), Simd::all(1.0f), Simd::all(0.0f)};
  if (kBelowZero && Simd::any(at_zero)) {
    search_above_min<kTop, Zero::kSome>(kAll, x8, sum_x, at_zero, best);
    search_above_min<kTop, Zero::kOnly>(std::make_integer_sequence<int, kNumFromZero>(), x8, sum_x, at_zero,
                                        best);
  } else {
    search_above_min<kTop, Zero::kNone>(kAll, x8, sum_x, at_zero, best);
  }
  return best;
}

// Blocks of 32; min <= 0 when kBelowZero (the K types subtract theirs).
template <int kTop, bool kBelowZero>
inline ScaleMin fit_above_min(const float* x) {
  const V zero = Simd::all(0.0f);
  V low, high;
  find_ends<8>(x, low, high);
  if (kBelowZero) low = Simd::min(low, zero);
  const V range = Simd::min(Simd::sub(high, low), Simd::all(kMostRange));
  const V unit = Simd::mul(inverse_or_zero(range), Simd::all(255.0f));
  const Spread factor(unit), offset(Simd::mul(Simd::sub(zero, low), unit));
  Bytes x8[8];
  Ints sum = Simd::zero_ints();
  for (int t = 0; t < 8; ++t) {
    V scaled[kParts];
    for (int p = 0; p < kParts; ++p) {
      scaled[p] = Simd::fma(Simd::load_part(x, 32, t, p), factor.p[p], offset.p[p]);
    }
    x8[t] = Simd::to_unsigned(scaled);
    sum = Simd::add_bytes(sum, x8[t]);
  }
  const V sum_x = Simd::to_float(sum);
  const BestMin best = search_above_min<kTop, kBelowZero>(x8, sum_x, low);
  const V slope = Simd::div(best.covariance, best.variance);
  const V start = Simd::mul(Simd::sub(sum_x, Simd::mul(slope, best.sum_q)), Simd::all(1.0f / 32.0f));
  const V step = Simd::mul(range, Simd::all(1.0f / 255.0f));
  ScaleMin fit = {Simd::mul(slope, step), Simd::fma(start, step, low)};
  if (kBelowZero) {
    // Without a minimum the scale is sum x q / sum q q.
    const V squares = Simd::mul(best.sum_q, best.sum_q), share = Simd::all(1.0f / 32.0f);
    const V qq = Simd::mul(Simd::add(best.variance, squares), share);
    const V xq = Simd::mul(Simd::fma(sum_x, best.sum_q, best.covariance), share);
    const V scale =
        Simd::div(Simd::fma(low, best.sum_q, Simd::mul(step, xq)), Simd::max(qq, Simd::all(1.0f)));
    const Simd::Mask above = Simd::greater(fit.min, zero);
    fit = {Simd::select(above, scale, fit.scale), Simd::select(above, zero, fit.min)};
  }
  return fit;
}
