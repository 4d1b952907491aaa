// Which scale (and minimum) makes the codes of a block differ least from its values, for every block of a
// group at once. Included inside the anonymous namespace of the encoders' tables, after Simd.
//
// A rounding to codes is fixed by an inverse scale (and an offset); once the codes are known the best scale
// (and minimum) for them is a least-squares problem with a closed solution, and so is its error. Each search
// tries some roundings and keeps the one of least error. It runs on the values rounded to signed bytes, in
// which a step of the codes is a power of two: another scale is then the bytes and some 2^-k of them, added
// with saturation at the ends of the codes' range, and the code is what a shift leaves. That is four or five
// instructions for sixteen or thirty-two values, dot products included, and every sum is exact and so the
// same everywhere. Codes are always rounded from the values themselves, once the scale is found.
//
// The roundings tried were picked one by one, each for what it takes off the error of Gaussian blocks, of
// heavy-tailed ones (Student's t, 4 degrees) and of a trained model's, beside those before it.
#pragma once

using V = Simd::V;
using Bytes = Simd::Bytes;
using Ints = Simd::Ints;
constexpr int kParts = 4;

// Below this a block's range is none: no scale of f16 is that small, and its inverse stays finite.
constexpr float kLeastRange = 1e-30f;

// 1.5 * 2^23: a sum with it has no bits left below one, and its lower bits are the integer.
constexpr float kMagic = 12582912.0f;

// A number per block, spread over the parts.
struct Spread {
  V p[kParts];
  explicit Spread(V x) : p{Simd::spread<0>(x), Simd::spread<1>(x), Simd::spread<2>(x), Simd::spread<3>(x)} {}
};

// What codes around zero leave of the values, in units: sums of rests times codes, of rests squared and of
// codes squared.
struct Rests {
  V rq[kParts], rr[kParts];
  Ints qq;

  Rests() : qq(Simd::zero_ints()) {
    for (int p = 0; p < kParts; ++p) rq[p] = rr[p] = Simd::all(0.0f);
  }
  // Codes of quad t of each block, -kHalf to kHalf - 1, plus kHalf.
  template <int kHalf, int kStride>
  Bytes code_quad(const float* x, int t, const Spread& by) {
    const V least = Simd::all(-kHalf), most = Simd::all(kHalf - 1), magic = Simd::all(kMagic);
    V sums[kParts];
    for (int p = 0; p < kParts; ++p) {
      const V y = Simd::mul(Simd::load_part(x, kStride, t, p), by.p[p]);
      sums[p] = Simd::add(Simd::min(Simd::max(y, least), most), magic);
      const V code = Simd::sub(sums[p], magic), rest = Simd::sub(y, code);
      rq[p] = Simd::fma(rest, code, rq[p]);
      rr[p] = Simd::fma(rest, rest, rr[p]);
    }
    const Bytes codes = Simd::low_bytes(sums);
    qq = Simd::dot_signed(qq, codes, codes);
    return Simd::add_saturated(codes, Simd::all_bytes(kHalf));
  }
};

inline V inverse_or_zero(V x) {
  const V zero = Simd::all(0.0f);
  const Simd::Mask good = Simd::greater(Simd::abs(x), Simd::all(kLeastRange));
  return Simd::select(good, Simd::div(Simd::all(1.0f), Simd::select(good, x, Simd::all(1.0f))), zero);
}

// Least and largest value of each block of kQuads * 4 elements; the blocks of a group lie kStride apart.
template <int kQuads, int kStride>
inline void find_ends(const float* x, V& low, V& high) {
  V least[kParts], most[kParts];
  for (int p = 0; p < kParts; ++p) {
    least[p] = most[p] = Simd::load_part(x, kStride, 0, p);
    for (int t = 1; t < kQuads; ++t) {
      const V v = Simd::load_part(x, kStride, t, p);
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

// ---------------------------------------------------------------- values as bytes, and their roundings

// What a rounding adds to the bytes before the shift: 2^-k of them for k = first and second (minus 2^-k for
// -k, nothing for 0), and a number.
struct Rounding {
  int first, second, add;
};
constexpr int kLeastPart = 3, kMostPart = 7;
constexpr int kSignedAtOnce = 5, kMinAtOnce = 4;  // roundings whose sums fit the registers

template <int kQuads>
struct ByteValues {
  Bytes high[kQuads], low[kQuads];                 // a value is high, and low / 256 where that is counted
  Bytes start[kQuads];                             // what roundings begin with
  Bytes part[kMostPart - kLeastPart + 1][kQuads];  // 2^-k of it, for the k that the roundings name

  template <int kPart>
  void make_part() {
    for (int t = 0; t < kQuads; ++t) part[kPart - kLeastPart][t] = Simd::round_shift<kPart>(high[t]);
  }
};

template <int kTerm, int kQuads>
inline Bytes with_part(const ByteValues<kQuads>& x, int t, Bytes sum) {
  if constexpr (kTerm > 0) return Simd::add_saturated(sum, x.part[kTerm - kLeastPart][t]);
  if constexpr (kTerm < 0) return Simd::sub_saturated(sum, x.part[-kTerm - kLeastPart][t]);
  return sum;
}

// Codes of the elements 4t .. 4t + 3, of which one step is 2^kShift.
template <int kShift, int kFirst, int kSecond, int kAdd, int kQuads>
inline Bytes rounded(const ByteValues<kQuads>& x, int t) {
  Bytes sum = with_part<kSecond>(x, t, with_part<kFirst>(x, t, x.start[t]));
  if constexpr (kAdd != 0) sum = Simd::add_saturated(sum, Simd::all_bytes(kAdd));
  return Simd::shift<kShift>(sum);
}

constexpr bool names_part(const Rounding* all, int count, int part) {
  for (int i = 0; i < count; ++i) {
    if (all[i].first == part || all[i].first == -part || all[i].second == part || all[i].second == -part) {
      return true;
    }
  }
  return false;
}

// The parts that some of the kCount roundings name.
template <const Rounding* kAll, int kCount, int kQuads>
inline void make_parts(ByteValues<kQuads>& x) {
  if constexpr (names_part(kAll, kCount, 3)) x.template make_part<3>();
  if constexpr (names_part(kAll, kCount, 4)) x.template make_part<4>();
  if constexpr (names_part(kAll, kCount, 5)) x.template make_part<5>();
  if constexpr (names_part(kAll, kCount, 6)) x.template make_part<6>();
  if constexpr (names_part(kAll, kCount, 7)) x.template make_part<7>();
}

// ---------------------------------------------------------------- x ~ scale * q, q in [-half, half - 1]

// The extreme value's byte is -124: its code -half, with some room to be scaled up.
constexpr float kSignedEnd = 124.0f;
constexpr Rounding kSigned4[] = {{3, 0, 0},  {3, -5, 0}, {3, 5, 0},   {5, 0, 0}, {4, 0, 0},
                                 {-4, 0, 0}, {-3, 6, 0}, {-3, -4, 0}, {6, 0, 0}, {-6, 0, 0}};
constexpr Rounding kSigned5[] = {{4, 0, 0},  {4, -5, 0}, {4, 5, 0},  {5, 0, 0},   {5, 6, 0},
                                 {-5, 0, 0}, {-5, 6, 0}, {-4, 6, 0}, {-4, -5, 0}, {6, 0, 0}};
constexpr Rounding kSigned6[] = {{-4, 0, 0}, {-4, 5, 0}, {-4, -5, 0}, {-5, 0, 0},
                                 {5, 0, 0},  {0, 0, 0},  {4, -6, 0},  {6, 7, 0}};

struct BestScale {
  V square, product, sum;  // of (sum x q)^2, sum x q and sum q q
};

struct SignedSums {
  Ints high = Simd::zero_ints(), low = high, qq = high;
};

template <int kShift, int kFirst, int kSecond, int kQuads>
inline void add_signed(const ByteValues<kQuads>& x, int t, SignedSums& sums) {
  const Bytes q = rounded<kShift, kFirst, kSecond, 0>(x, t);
  sums.high = Simd::dot_signed(sums.high, q, x.high[t]);
  sums.low = Simd::dot_signed(sums.low, x.low[t], q);
  sums.qq = Simd::dot_signed(sums.qq, q, q);
}

inline void keep_better(const SignedSums& sums, BestScale& best) {
  // sum (x - s q)^2 is least at s = xq / qq, and is then xx - xq^2 / qq: the largest xq^2 / qq wins.
  const V product = Simd::to_float(sums.high, sums.low), sum = Simd::to_float(sums.qq);
  const V square = Simd::mul(product, product);
  const Simd::Mask better = Simd::greater(Simd::mul(square, best.sum), Simd::mul(best.square, sum));
  best = {Simd::select(better, square, best.square), Simd::select(better, product, best.product),
          Simd::select(better, sum, best.sum)};
}

// Roundings kFrom and the next ones, as many as have room for their sums in registers.
template <const Rounding* kAll, int kShift, int kFrom, int kQuads, int... kIndex>
__attribute__((noinline)) void try_signed(std::integer_sequence<int, kIndex...>, const ByteValues<kQuads>& x,
                                          BestScale& best) {
  SignedSums sums[sizeof...(kIndex)];
#pragma GCC unroll 2
  for (int t = 0; t < kQuads; ++t) {
    (add_signed<kShift, kAll[kFrom + kIndex].first, kAll[kFrom + kIndex].second>(x, t, sums[kIndex]), ...);
  }
  (keep_better(sums[kIndex], best), ...);
}

template <const Rounding* kAll, int kShift, int kCount, int kFrom = 0, int kQuads>
inline void search_signed(const ByteValues<kQuads>& x, BestScale& best) {
  if constexpr (kFrom < kCount) {
    constexpr int kSome = kCount - kFrom < kSignedAtOnce ? kCount - kFrom : kSignedAtOnce;
    try_signed<kAll, kShift, kFrom>(std::make_integer_sequence<int, kSome>(), x, best);
    search_signed<kAll, kShift, kCount, kFrom + kSome>(x, best);
  }
}

// The extreme value of each block, and what makes fine bytes of its values.
struct SignedRange {
  V extreme, factor;
};

template <int kQuads, int kStride>
inline SignedRange signed_range(const float* x) {
  V low, high;
  find_ends<kQuads, kStride>(x, low, high);
  const V extreme = extreme_of(low, high);
  return {extreme, Simd::mul(inverse_or_zero(extreme), Simd::all(-256.0f * kSignedEnd))};
}

// Blocks of kQuads * 4, steps of 2^kShift. The scale has the sign that gives the extreme value the code
// -half.
template <int kQuads, int kShift, const Rounding* kAll, int kCount, int kStride = 4 * kQuads>
inline V fit_signed(const float* x, const SignedRange& range) {
  const Spread factor(range.factor);
  const V magic = Simd::all(kMagic + 128.0f);
  const Bytes half_step = Simd::all_bytes(1 << (kShift - 1));
  ByteValues<kQuads> bytes;
  for (int t = 0; t < kQuads; ++t) {
    V scaled[kParts];
    for (int p = 0; p < kParts; ++p) {
      scaled[p] = Simd::fma(Simd::load_part(x, kStride, t, p), factor.p[p], magic);
    }
    Simd::split_bytes(scaled, bytes.high[t], bytes.low[t]);
    bytes.start[t] = Simd::add_saturated(bytes.high[t], half_step);
  }
  make_parts<kAll, kCount>(bytes);
  BestScale best = {Simd::all(0.0f), Simd::all(0.0f), Simd::all(1.0f)};
  search_signed<kAll, kShift, kCount>(bytes, best);
  const V unit = Simd::mul(range.extreme, Simd::all(-1.0f / (256.0f * kSignedEnd)));
  return Simd::mul(Simd::div(best.product, Simd::max(best.sum, Simd::all(1.0f))), unit);
}

inline V fit_4_bits(const float* x, const SignedRange& range) {
  return fit_signed<8, 4, kSigned4, 10>(x, range);
}
inline V fit_5_bits(const float* x, const SignedRange& range) {
  return fit_signed<8, 3, kSigned5, 10>(x, range);
}
template <int kStride>
inline V fit_6_bits(const float* x, const SignedRange& range) {
  return fit_signed<4, 2, kSigned6, 8, kStride>(x, range);
}

// ---------------------------------------------------------------- x ~ scale * q + min, q in [0, top]

// The bytes lie around 0, the block's middle; codes less (top + 1) / 2 are then what a shift leaves.
template <int kTop>
struct MinSearch;
template <>
struct MinSearch<15> {
  static constexpr int kShift = 4, kHalf = 8, kCount = 7, kCountBelowZero = 7, kCountFromZero = 5;
  static constexpr float kEnd = 120.0f;
  static constexpr Rounding kAll[] = {{5, 0, 0},  {5, 0, 4},  {-4, 0, 6}, {-4, 0, -6},
                                      {6, 0, -6}, {0, 0, -2}, {0, 0, 2}};
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

// Where the values of each block lie: value = middle + step * byte.
struct MinRange {
  V low, middle, step, per_step;
};

struct MinBytes : ByteValues<8> {
  V sum;  // of the bytes
};

// A gain of numerator / denominator, and the sums behind it. The denominator is the variance but for blocks
// that begin at 0.
struct BestMin {
  V numerator, denominator, covariance, variance, sum_q;
};

// kNone: no block has to begin at 0 or below. kSome: those in `at_zero` do, and have no values below 0.
// kOnly: for those alone.
enum class Zero { kNone, kSome, kOnly };
struct MinSums {
  Ints sum = Simd::zero_ints(), squares = sum, products = sum;
};

template <int kTop, int kFirst, int kAdd>
inline void add_above_min(const MinBytes& x, int t, MinSums& sums) {
  const Bytes q = rounded<MinSearch<kTop>::kShift, kFirst, 0, kAdd>(x, t);
  sums.sum = Simd::sum_signed(sums.sum, q);
  sums.squares = Simd::dot_signed(sums.squares, q, q);
  sums.products = Simd::dot_signed(sums.products, q, x.high[t]);
}

template <int kTop, Zero kZero>
inline void keep_better(const MinSums& sums, const MinBytes& x, Simd::Mask at_zero, BestMin& best) {
  using Search = MinSearch<kTop>;
  // The slope of x over q is covariance / variance (both times 32^2), and takes covariance^2 / variance off
  // the error.
  const V sum_q = Simd::to_float(sums.sum), count = Simd::all(32.0f), one = Simd::all(1.0f);
  const V qq = Simd::to_float(sums.squares), xq = Simd::to_float(sums.products);
  const V covariance = Simd::sub(Simd::mul(count, xq), Simd::mul(x.sum, sum_q));
  const V variance = Simd::max(Simd::sub(Simd::mul(count, qq), Simd::mul(sum_q, sum_q)), one);
  V numerator = Simd::mul(covariance, covariance), denominator = variance;
  if constexpr (kZero != Zero::kNone) {
    // Values and codes from 0. A minimum above 0 is not to be had: without one xq^2 / qq is taken off.
    const V end = Simd::all(Search::kEnd), half = Simd::all(static_cast<float>(Search::kHalf));
    const V sum_x = Simd::fma(end, count, x.sum), sum_c = Simd::fma(half, count, sum_q);
    const V xc = Simd::fma(end, sum_c, Simd::fma(half, x.sum, xq));
    const V cc = Simd::fma(half, Simd::add(sum_q, sum_c), qq);
    const Simd::Mask above = Simd::greater(Simd::mul(sum_x, variance), Simd::mul(covariance, sum_c));
    const V line = Simd::fma(Simd::mul(sum_x, sum_x), variance, numerator);
    const V origin = Simd::mul(Simd::mul(xc, xc), count);
    const V other = kZero == Zero::kOnly ? Simd::all(0.0f) : numerator;
    numerator = Simd::select(at_zero, Simd::select(above, origin, line), other);
    denominator = Simd::select(at_zero, Simd::select(above, Simd::max(cc, one), variance), denominator);
  }
  const Simd::Mask better =
      Simd::greater(Simd::mul(numerator, best.denominator), Simd::mul(best.numerator, denominator));
  best = {Simd::select(better, numerator, best.numerator),
          Simd::select(better, denominator, best.denominator),
          Simd::select(better, covariance, best.covariance), Simd::select(better, variance, best.variance),
          Simd::select(better, sum_q, best.sum_q)};
}

template <int kTop, Zero kZero, int kFrom, int... kIndex>
__attribute__((noinline)) void try_above_min(std::integer_sequence<int, kIndex...>, const MinBytes& x,
                                             Simd::Mask at_zero, BestMin& best) {
  constexpr const Rounding* kTried =
      kZero == Zero::kOnly ? MinSearch<kTop>::kFromZero : MinSearch<kTop>::kAll;
  MinSums sums[sizeof...(kIndex)];
#pragma GCC unroll 2
  for (int t = 0; t < 8; ++t) {
    (add_above_min<kTop, kTried[kFrom + kIndex].first, kTried[kFrom + kIndex].add>(x, t, sums[kIndex]), ...);
  }
  (keep_better<kTop, kZero>(sums[kIndex], x, at_zero, best), ...);
}

template <int kTop, Zero kZero, int kCount, int kFrom = 0>
inline void try_all_above_min(const MinBytes& x, Simd::Mask at_zero, BestMin& best) {
  if constexpr (kFrom < kCount) {
    constexpr int kSome = kCount - kFrom < kMinAtOnce ? kCount - kFrom : kMinAtOnce;
    try_above_min<kTop, kZero, kFrom>(std::make_integer_sequence<int, kSome>(), x, at_zero, best);
    try_all_above_min<kTop, kZero, kCount, kFrom + kSome>(x, at_zero, best);
  }
}

template <int kTop, bool kBelowZero>
inline BestMin search_above_min(MinBytes& x, V low) {  // low: at most 0, if kBelowZero
  using Search = MinSearch<kTop>;
  constexpr int kCount = kBelowZero ? Search::kCountBelowZero : Search::kCount;
  make_parts<Search::kAll, kCount>(x);
  const V zero = Simd::all(0.0f), one = Simd::all(1.0f);
  const Simd::Mask at_zero = Simd::greater(low, Simd::all(-kLeastRange));
  BestMin best = {zero, one, zero, one, zero};
  if (kBelowZero && Simd::any(at_zero)) {
    make_parts<Search::kFromZero, Search::kCountFromZero>(x);
    try_all_above_min<kTop, Zero::kSome, kCount>(x, at_zero, best);
    try_all_above_min<kTop, Zero::kOnly, Search::kCountFromZero>(x, at_zero, best);
  } else {
    try_all_above_min<kTop, Zero::kNone, kCount>(x, at_zero, best);
  }
  return best;
}

// kBelowZero: the minimum may not be above 0 (the K types subtract theirs).
template <int kTop, bool kBelowZero, int kStride>
inline MinRange min_range(const float* x) {
  const V zero = Simd::all(0.0f), half = Simd::all(0.5f);
  V low, high;
  find_ends<8, kStride>(x, low, high);
  if (kBelowZero) low = Simd::min(low, zero);
  // Halved first: the largest numbers' difference is none.
  low = Simd::mul(low, half);
  high = Simd::mul(high, half);
  const V reach = Simd::sub(high, low);
  return {low, Simd::add(high, low), Simd::mul(reach, Simd::all(1.0f / MinSearch<kTop>::kEnd)),
          Simd::mul(inverse_or_zero(reach), Simd::all(MinSearch<kTop>::kEnd))};
}

// The line found, and sums over the codes (from 0) it was found with and the values.
struct MinFit {
  V scale, min;
  V sum_c, cc, mean_x, xc;
};

template <int kTop, bool kBelowZero, int kStride>
inline MinFit fit_above_min(const float* x, const MinRange& range) {
  using Search = MinSearch<kTop>;
  const V zero = Simd::all(0.0f), magic = Simd::all(kMagic);
  const Spread middle(range.middle), factor(range.per_step);
  MinBytes bytes;
  Ints sum = Simd::zero_ints();
  for (int t = 0; t < 8; ++t) {
    V scaled[kParts];
    for (int p = 0; p < kParts; ++p) {
      scaled[p] = Simd::fma(Simd::sub(Simd::load_part(x, kStride, t, p), middle.p[p]), factor.p[p], magic);
    }
    bytes.high[t] = bytes.start[t] = Simd::low_bytes(scaled);
    sum = Simd::sum_signed(sum, bytes.high[t]);
  }
  bytes.sum = Simd::to_float(sum);
  const BestMin best = search_above_min<kTop, kBelowZero>(bytes, range.low);
  const V halves = Simd::all(static_cast<float>(Search::kHalf)), share = Simd::all(1.0f / kBlock);
  const V slope = Simd::div(best.covariance, best.variance);
  MinFit fit;
  fit.sum_c = Simd::fma(halves, Simd::all(kBlock), best.sum_q);
  fit.cc = Simd::mul(Simd::fma(fit.sum_c, fit.sum_c, best.variance), share);
  fit.mean_x = Simd::fma(Simd::mul(bytes.sum, share), range.step, range.middle);
  fit.xc = Simd::fma(fit.mean_x, fit.sum_c, Simd::mul(Simd::mul(best.covariance, share), range.step));
  fit.scale = Simd::mul(slope, range.step);
  fit.min = Simd::sub(fit.mean_x, Simd::mul(fit.scale, Simd::mul(fit.sum_c, share)));
  if (kBelowZero) {
    // Without a minimum the scale is sum x q / sum q q.
    const Simd::Mask above = Simd::greater(fit.min, zero);
    fit.scale = Simd::select(above, Simd::div(fit.xc, Simd::max(fit.cc, Simd::all(1.0f))), fit.scale);
    fit.min = Simd::select(above, zero, fit.min);
  }
  return fit;
}
