// Which scale (and minimum) makes the codes of a block differ least from its values, for every block of a
// group at once. Included inside the anonymous namespace of the encoders' tables, after Simd.
//
// A rounding to codes is fixed by an inverse scale (and an offset); once the codes are known the best scale
// (and minimum) for them is a least-squares problem with a closed solution, and so is its error. Each search
// tries some roundings and keeps the one of least error. It runs on the values rounded to words of sixteen
// bits in proportion to the block's range, or on the upper bytes of those, in which a step of the codes is a
// power of two: another scale is then the values and some 2^-k of them, added with saturation at the ends of
// the codes' range, and the code is what a shift leaves. For bytes that is four or five instructions for
// sixteen or thirty-two values, dot products included, and every sum is exact and so the same everywhere. By
// the scale found the codes are rounded again, from words, and by dot products it is known what they miss.
//
// The roundings tried were picked for what they leave of the error of Gaussian blocks, of heavy-tailed ones
// (Student's t, 4 degrees), of a trained model's and of one stored as q4_1: one by one, and each again beside
// all the others.
#pragma once

using V = Simd::V;
using Bytes = Simd::Bytes;
using Ints = Simd::Ints;
using Words = Simd::Words;
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

// ---------------------------------------------------------------- values as words, and their roundings

// What a rounding adds to words or bytes before the shift: 2^-k of them for k = first and second (minus 2^-k
// for -k, nothing for 0), and a number.
struct Rounding {
  int first, second, add;
};

// The values of a group's blocks in sixteen bits, in proportion to the range of each, and the two bytes of
// those: a value is 256 high + low, and its word 128 more.
template <int kQuads>
struct FineValues {
  Words word[kQuads];
  Bytes high[kQuads], low[kQuads];

  void set(int t, const V* sums) {  // sums of kMagic and the words
    word[t] = Simd::words(sums);
    Simd::split(word[t], high[t], low[t]);
  }
};
constexpr float kWordBias = 128.0f;

template <int kTerm, class T>
inline T with_part(T x, T sum) {
  if constexpr (kTerm > 0) return Simd::add_saturated(sum, Simd::round_shift<kTerm>(x));
  if constexpr (kTerm < 0) return Simd::sub_saturated(sum, Simd::round_shift<-kTerm>(x));
  return sum;
}

// Codes of values x, bytes or words, of which one step is 2^kShift (upper) bytes; from `start`.
template <int kShift, int kFirst, int kSecond, class T>
inline Bytes rounded(T x, T start) {
  const T sum = with_part<kSecond>(x, with_part<kFirst>(x, start));
  if constexpr (std::is_same_v<T, Words>) {
    return Simd::shift<kShift>(Simd::high_bytes(sum));
  } else {
    return Simd::shift<kShift>(sum);
  }
}

// The best of kCount: a tournament, which waits for fewer of the comparisons before it than a row of them.
template <int kCount, class Entry, class Of>
inline Entry best_of(const Of& of, int from = 0) {
  if constexpr (kCount == 1) {
    return of(from);
  } else {
    return better_of(best_of<kCount / 2, Entry>(of, from),
                     best_of<kCount - kCount / 2, Entry>(of, from + kCount / 2));
  }
}

// ---------------------------------------------------------------- x ~ scale * q, q in [-half, half - 1]

// The extreme value's byte is -124: its code -half, with some room to be scaled up.
constexpr float kSignedEnd = 124.0f;

// What a rounding's codes come to: sums of x q, of q q, and the former squared.
struct Scale {
  V product, sum, square;
};

// sum (x - s q)^2 is least at s = xq / qq, and is then xx - xq^2 / qq: the largest xq^2 / qq wins.
inline Scale better_of(const Scale& a, const Scale& b) {
  const Simd::Mask second = Simd::greater(Simd::mul(b.square, a.sum), Simd::mul(a.square, b.sum));
  return {Simd::select(second, b.product, a.product), Simd::select(second, b.sum, a.sum),
          Simd::select(second, b.square, a.square)};
}

// kWords: the roundings are those of words, and their lower bytes count too. Where a step of the codes is few
// bytes, what bytes say of a rounding is too coarse.
template <bool kWords>
struct SignedSums {
  Ints high = Simd::zero_ints(), low = high, squares = high;

  template <int kQuads>
  void add(const FineValues<kQuads>& x, int t, Bytes q) {
    high = Simd::dot_signed(high, q, x.high[t]);
    if (kWords) low = Simd::dot_signed(low, x.low[t], q);
    squares = Simd::dot_signed(squares, q, q);
  }
  Scale scale() const {
    const V product = kWords ? Simd::to_float(high, low) : Simd::to_float(high);
    return {product, Simd::to_float(squares), Simd::mul(product, product)};
  }
};

template <int kBits>
struct SignedSearch;
template <>
struct SignedSearch<4> {
  static constexpr bool kWords = false;
  static constexpr Rounding kAll[] = {{0, 0, 0},   {4, 0, 0}, {-4, 0, 0}, {3, 0, 0},
                                      {-3, -4, 0}, {3, 4, 0}, {-3, 6, 0}, {4, 5, 0}};
};
template <>
struct SignedSearch<5> {
  static constexpr bool kWords = true;
  static constexpr Rounding kAll[] = {{5, 0, 0}, {-5, 0, 0}, {4, 0, 0}, {-5, -4, 0}};
};
template <>
struct SignedSearch<6> {
  static constexpr bool kWords = true;
  static constexpr Rounding kAll[] = {{5, 0, 0}, {0, 0, 0}, {-5, 0, 0}, {-4, 0, 0}, {-5, -4, 0}};
};

template <int kBits, int kQuads, int... kIndex>
inline Scale search_signed(std::integer_sequence<int, kIndex...>, const FineValues<kQuads>& x) {
  using Search = SignedSearch<kBits>;
  constexpr int kCount = sizeof...(kIndex), kShift = 8 - kBits;
  SignedSums<Search::kWords> sums[kCount];
#pragma GCC unroll 1
  for (int t = 0; t < kQuads; ++t) {
    const auto add_all = [&](auto values, auto half_step) {
      const auto start = Simd::add_saturated(values, half_step);
      (sums[kIndex].add(
           x, t, rounded<kShift, Search::kAll[kIndex].first, Search::kAll[kIndex].second>(values, start)),
       ...);
    };
    if constexpr (Search::kWords) {
      add_all(x.word[t], Simd::all_words((128 << kShift) - static_cast<int>(kWordBias)));
    } else {
      add_all(x.high[t], Simd::all_bytes(1 << (kShift - 1)));
    }
  }
  return best_of<kCount, Scale>([&](int i) { return sums[i].scale(); });
}

// The extreme value of each block, and what makes words of its values; and what a word's one is.
struct SignedRange {
  V extreme, factor;

  V unit() const { return Simd::mul(extreme, Simd::all(-1.0f / (256.0f * kSignedEnd))); }
};

template <int kQuads, int kStride>
inline SignedRange signed_range(const float* x) {
  V low, high;
  find_ends<kQuads, kStride>(x, low, high);
  const V extreme = extreme_of(low, high);
  return {extreme, Simd::mul(inverse_or_zero(extreme), Simd::all(-256.0f * kSignedEnd))};
}

// Blocks of kQuads * 4 as words, and the codes' best scale in units of those. Codes are -half to half - 1, a
// step of them 2^kShift bytes; the scale has the sign that gives the extreme value the code -half.
template <int kBits, int kQuads, int kStride>
inline V fit_signed(const float* x, const SignedRange& range, FineValues<kQuads>& fine) {
  const Spread factor(range.factor);
  const V magic = Simd::all(kMagic + kWordBias);
  for (int t = 0; t < kQuads; ++t) {
    V sums[kParts];
    for (int p = 0; p < kParts; ++p) {
      sums[p] = Simd::fma(Simd::load_part(x, kStride, t, p), factor.p[p], magic);
    }
    fine.set(t, sums);
  }
  constexpr int kCount = std::size(SignedSearch<kBits>::kAll);
  const Scale best = search_signed<kBits>(std::make_integer_sequence<int, kCount>(), fine);
  const V scale = Simd::div(best.product, Simd::max(best.sum, Simd::all(1.0f)));
  return SignedSearch<kBits>::kWords ? scale : Simd::mul(scale, Simd::all(256.0f));
}

// Sums over a block's values and codes.
struct CodeSums {
  V xx, xq, qq;

  // Of (x - scale q)^2.
  V missed(V scale) const {
    const V twice = Simd::add(xq, xq);
    const V gain = Simd::mul(scale, Simd::sub(twice, Simd::mul(scale, qq)));
    return Simd::max(Simd::sub(xx, gain), Simd::all(0.0f));
  }
};

// The sum of the squares of a block's words.
template <int kQuads>
inline V squares_of(const FineValues<kQuads>& x) {
  Ints high = Simd::zero_ints(), cross = high, low = high;
  for (int t = 0; t < kQuads; ++t) {
    high = Simd::dot_signed(high, x.high[t], x.high[t]);
    cross = Simd::dot_signed(cross, x.low[t], x.high[t]);
    low = Simd::add_squares(low, x.low[t]);
  }
  const V rest = Simd::fma(Simd::to_float(cross), Simd::all(512.0f), Simd::to_float(low));
  return Simd::fma(Simd::to_float(high), Simd::all(65536.0f), rest);
}

// Numbers of each block as words beside those of its values.
inline Words block_words(V x) {
  const Spread sums(
      Simd::add(Simd::min(Simd::max(x, Simd::all(-32768.0f)), Simd::all(32767.0f)), Simd::all(kMagic)));
  return Simd::words(sums.p);
}

// How words grow to where their upper bits are codes: by `more` of them, and by half a step.
struct Growth {
  Words more, half_step;
};

template <int kBits>
inline Growth growth_of(V times) {  // 0 to 2
  constexpr float kHalfStep = 32768 >> kBits, kOne = 32768.0f;
  return {block_words(Simd::fma(times, Simd::all(kOne), Simd::all(-kOne))),
          block_words(Simd::fma(times, Simd::all(-kWordBias), Simd::all(kHalfStep)))};
}

// Codes plus half: the upper bits of words, which saturate where codes do.
template <int kBits, int kQuads>
inline CodeSums code_signed(const FineValues<kQuads>& x, const Growth& growth, Bytes* quads) {
  constexpr int kShift = 8 - kBits;
  const Bytes half = Simd::all_bytes(128 >> kShift);
  Ints high = Simd::zero_ints(), low = high, squares = high;
  for (int t = 0; t < kQuads; ++t) {
    const Words steps = Simd::add_saturated(Simd::fma(x.word[t], growth.more, x.word[t]), growth.half_step);
    const Bytes q = Simd::shift<kShift>(Simd::high_bytes(steps));
    high = Simd::dot_signed(high, q, x.high[t]);
    low = Simd::dot_signed(low, x.low[t], q);
    squares = Simd::dot_signed(squares, q, q);
    quads[t] = Simd::add_saturated(q, half);
  }
  return {squares_of(x), Simd::to_float(high, low), Simd::to_float(squares)};
}

// ---------------------------------------------------------------- x ~ scale * q + min, q in [0, top]

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
  const Simd::Mask second =
      Simd::greater(Simd::mul(b.numerator, a.denominator), Simd::mul(a.numerator, b.denominator));
  const auto pick = [&](V x, V y) { return Simd::select(second, y, x); };
  return {pick(a.numerator, b.numerator), pick(a.denominator, b.denominator),
          pick(a.covariance, b.covariance), pick(a.variance, b.variance), pick(a.sum_q, b.sum_q)};
}

// kNone: no block has to begin at 0 or below. kSome: those in `at_zero` do, and have no values below 0.
// kOnly: for those alone.
enum class Zero { kNone, kSome, kOnly };
struct MinSums {
  Ints sum = Simd::zero_ints(), squares = sum, products = sum;
};

template <int kTop, int kFirst, int kAdd>
inline void add_above_min(const FineValues<8>& x, int t, MinSums& sums) {
  Bytes start = x.high[t];
  if constexpr (kAdd != 0) start = Simd::add_saturated(start, Simd::all_bytes(kAdd));
  const Bytes q = rounded<MinSearch<kTop>::kShift, kFirst, 0>(x.high[t], start);
  sums.sum = Simd::sum_signed(sums.sum, q);
  sums.squares = Simd::dot_signed(sums.squares, q, q);
  sums.products = Simd::dot_signed(sums.products, q, x.high[t]);
}

template <int kTop, Zero kZero>
inline Slope slope_of(const MinSums& sums, const MinValues& x, Simd::Mask at_zero) {
  using Search = MinSearch<kTop>;
  // The slope of x over q is covariance / variance (both times 32), and takes covariance^2 / variance off the
  // error.
  const V sum_q = Simd::to_float(sums.sum), share = Simd::all(-1.0f / kBlock);
  const V qq = Simd::to_float(sums.squares), xq = Simd::to_float(sums.products);
  const V covariance = Simd::fma(x.minus_mean, sum_q, xq);
  const V variance = Simd::max(Simd::fma(Simd::mul(sum_q, share), sum_q, qq), Simd::all(1.0f / kBlock));
  V numerator = Simd::mul(covariance, covariance), denominator = variance;
  if constexpr (kZero != Zero::kNone) {
    // Values and codes from 0. A minimum above 0 is not to be had: without one xq^2 / qq is taken off.
    const V count = Simd::all(kBlock), end = Simd::all(Search::kEnd), half = Simd::all(Search::kHalf);
    const V mean_x = Simd::sub(end, x.minus_mean), sum_c = Simd::fma(half, count, sum_q);
    const V sum_x = Simd::mul(mean_x, count);
    const V xc = Simd::fma(mean_x, sum_c, covariance);
    const V cc = Simd::fma(half, Simd::add(sum_q, sum_c), qq);
    const Simd::Mask above = Simd::greater(Simd::mul(sum_x, variance), Simd::mul(covariance, sum_c));
    const V line = Simd::fma(Simd::mul(sum_x, mean_x), variance, numerator), origin = Simd::mul(xc, xc);
    const V other = kZero == Zero::kOnly ? Simd::all(0.0f) : numerator;
    numerator = Simd::select(at_zero, Simd::select(above, origin, line), other);
    denominator =
        Simd::select(at_zero, Simd::select(above, Simd::max(cc, Simd::all(1.0f)), variance), denominator);
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
inline Slope best_slope(const MinValues& x, Simd::Mask at_zero) {
  MinSums sums[kCount];
  try_all_above_min<kTop, kZero, kCount>(x, sums);
  return best_of<kCount, Slope>([&](int i) { return slope_of<kTop, kZero>(sums[i], x, at_zero); });
}

// Where some blocks begin at 0, which is seldom: those, and with roundings of their own.
template <int kTop, int kCount>
__attribute__((noinline)) Slope best_slope_with_zeros(const MinValues& x, Simd::Mask at_zero) {
  return better_of(best_slope<kTop, Zero::kSome, kCount>(x, at_zero),
                   best_slope<kTop, Zero::kOnly, MinSearch<kTop>::kCountFromZero>(x, at_zero));
}

template <int kTop, bool kBelowZero>
inline Slope search_above_min(const MinValues& x, V low) {  // low: at most 0, if kBelowZero
  using Search = MinSearch<kTop>;
  constexpr int kCount = kBelowZero ? Search::kCountBelowZero : Search::kCount;
  const Simd::Mask at_zero = Simd::greater(low, Simd::all(-kLeastRange));
  if (kBelowZero && Simd::any(at_zero)) return best_slope_with_zeros<kTop, kCount>(x, at_zero);
  return best_slope<kTop, Zero::kNone, kCount>(x, at_zero);
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
  constexpr float kWords = 256.0f * MinSearch<kTop>::kEnd;
  return {low, Simd::add(high, low), Simd::mul(reach, Simd::all(1.0f / kWords)),
          Simd::mul(inverse_or_zero(reach), Simd::all(kWords))};
}

// The line found, and sums over the codes (from 0) it was found with and the values.
struct MinFit {
  V scale, min;
  V sum_c, cc, mean_x, xc;
};

template <int kStride>
inline void set_min_values(const float* x, const MinRange& range, MinValues& fine) {
  const V from =
      Simd::fma(Simd::sub(Simd::all(0.0f), range.middle), range.per_unit, Simd::all(kMagic + kWordBias));
  const Spread factor(range.per_unit), plus(from);
  Ints sum = Simd::zero_ints();
  for (int t = 0; t < 8; ++t) {
    V sums[kParts];
    for (int p = 0; p < kParts; ++p) {
      sums[p] = Simd::fma(Simd::load_part(x, kStride, t, p), factor.p[p], plus.p[p]);
    }
    fine.set(t, sums);
    sum = Simd::sum_signed(sum, fine.high[t]);
  }
  fine.sum_high = Simd::to_float(sum);
  fine.minus_mean = Simd::mul(fine.sum_high, Simd::all(-1.0f / kBlock));
}

template <int kTop, bool kBelowZero>
inline MinFit fit_above_min(const MinRange& range, const MinValues& fine, const Slope& best) {
  const V share = Simd::all(1.0f / kBlock), step = Simd::mul(range.unit, Simd::all(256.0f));
  MinFit fit;
  fit.sum_c = Simd::fma(Simd::all(MinSearch<kTop>::kHalf), Simd::all(kBlock), best.sum_q);
  const V mean_c = Simd::mul(fit.sum_c, share);
  fit.cc = Simd::fma(mean_c, fit.sum_c, best.variance);
  fit.mean_x = Simd::sub(range.middle, Simd::mul(fine.minus_mean, step));
  fit.xc = Simd::fma(fit.mean_x, fit.sum_c, Simd::mul(best.covariance, step));
  fit.scale = Simd::mul(Simd::div(best.covariance, best.variance), step);
  fit.min = Simd::sub(fit.mean_x, Simd::mul(fit.scale, mean_c));
  if (kBelowZero) {
    // Without a minimum the scale is sum x q / sum q q.
    const V zero = Simd::all(0.0f);
    const Simd::Mask above = Simd::greater(fit.min, zero);
    if (Simd::any(above)) {
      fit.scale = Simd::select(above, Simd::div(fit.xc, Simd::max(fit.cc, Simd::all(1.0f))), fit.scale);
      fit.min = Simd::select(above, zero, fit.min);
    }
  }
  return fit;
}

// Sums over a block's values and codes, of codes less half.
struct LineSums {
  V xx, x, xq, q, qq;

  // Of (x - scale q - base)^2.
  V missed(V scale, V base) const {
    const V count = Simd::all(kBlock), line = Simd::add(base, base);
    const V of_x = Simd::fma(Simd::add(scale, scale), xq, Simd::mul(line, x));
    const V of_q = Simd::mul(scale, Simd::fma(line, q, Simd::mul(scale, qq)));
    const V squares = Simd::fma(Simd::mul(base, base), count, Simd::add(xx, of_q));
    return Simd::max(Simd::sub(squares, of_x), Simd::all(0.0f));
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
  const V zero = Simd::all(0.0f), least = Simd::all(-32768.0f);
  const Simd::Mask some = Simd::greater(scale, Simd::all(kLeastRange));
  const V steps = Simd::div(Simd::all(128 << kShift), Simd::select(some, scale, Simd::all(1.0f)));
  const V times = Simd::mul(range.unit, steps);  // halved, as all from here
  const V half_step = Simd::fma(times, Simd::all(-kWordBias), Simd::all((64 << kShift) - 16384));
  const V up = Simd::fma(Simd::sub(range.middle, base), steps, half_step);
  return {block_words(Simd::select(some, Simd::mul(times, Simd::all(32768.0f)), zero)),
          block_words(Simd::select(some, up, least))};
}

// Codes from 0.
template <int kTop>
inline LineSums code_line(const MinValues& x, const Line& line, Bytes* quads) {
  constexpr int kShift = MinSearch<kTop>::kShift;
  const Bytes half = Simd::all_bytes(128 >> kShift);
  const Ints zero = Simd::zero_ints();
  Ints high = zero, low = zero, sum_low = zero, sum = zero, squares = zero;
  for (int t = 0; t < 8; ++t) {
    const Words halves = Simd::fma(x.word[t], line.times, line.up);
    const Bytes q = Simd::shift<kShift>(Simd::high_bytes(Simd::add_saturated(halves, halves)));
    high = Simd::dot_signed(high, q, x.high[t]);
    low = Simd::dot_signed(low, x.low[t], q);
    sum_low = Simd::sum_signed(sum_low, x.low[t]);
    sum = Simd::sum_signed(sum, q);
    squares = Simd::dot_signed(squares, q, q);
    quads[t] = Simd::add_saturated(q, half);
  }
  return {squares_of(x), Simd::fma(x.sum_high, Simd::all(256.0f), Simd::to_float(sum_low)),
          Simd::to_float(high, low), Simd::to_float(sum), Simd::to_float(squares)};
}
