// The search of a scale: x ~ scale * q, q in [-half, half - 1], for every block of a group at once
// (group_values.h).
#pragma once

#include <utility>

#include "kernels/cpu/quant/group_values.h"
#include "kernels/cpu/simd/lanes.h"

namespace millrace::quant::MILLRACE_TARGET {
namespace {

// The extreme value's byte is -124: its code -half, with some room to be scaled up.
constexpr float kSignedEnd = 124.0f;

// What a rounding's codes come to: sums of x q, of q q, and the former squared.
struct Scale {
  V product, sum, square;
};

// sum (x - s q)^2 is least at s = xq / qq, and is then xx - xq^2 / qq: the largest xq^2 / qq wins.
inline Scale better_of(const Scale& a, const Scale& b) {
  const Lanes::Mask second = Lanes::greater(Lanes::mul(b.square, a.sum), Lanes::mul(a.square, b.sum));
  return {Lanes::select(second, b.product, a.product), Lanes::select(second, b.sum, a.sum),
          Lanes::select(second, b.square, a.square)};
}

// kWords: the roundings are those of words, and their lower bytes count too. Where a step of the codes is few
// bytes, what bytes say of a rounding is too coarse.
template <bool kWords>
struct SignedSums {
  Ints high = Lanes::zero_ints(), low = high, squares = high;

  template <int kQuads>
  void add(const FineValues<kQuads>& x, int t, Bytes q) {
    high = Lanes::dot_signed(high, q, x.high[t]);
    if (kWords) low = Lanes::dot_signed(low, x.low[t], q);
    squares = Lanes::dot_signed(squares, q, q);
  }
  Scale scale() const {
    const V product = kWords ? Lanes::to_float(high, low) : Lanes::to_float(high);
    return {product, Lanes::to_float(squares), Lanes::mul(product, product)};
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
      const auto start = Lanes::add_saturated(values, half_step);
      (sums[kIndex].add(
           x, t, rounded<kShift, Search::kAll[kIndex].first, Search::kAll[kIndex].second>(values, start)),
       ...);
    };
    if constexpr (Search::kWords) {
      add_all(x.word[t], Lanes::all_words((128 << kShift) - static_cast<int>(kWordBias)));
    } else {
      add_all(x.high[t], Lanes::all_bytes(1 << (kShift - 1)));
    }
  }
  return best_of<kCount, Scale>([&](int i) { return sums[i].scale(); });
}

// The extreme value of each block, and what makes words of its values; and what a word's one is.
struct SignedRange {
  V extreme, factor;

  V unit() const { return Lanes::mul(extreme, Lanes::all(-1.0f / (256.0f * kSignedEnd))); }
};

template <int kQuads, int kStride>
inline SignedRange signed_range(const float* x) {
  V low, high;
  find_ends<kQuads, kStride>(x, low, high);
  const V extreme = extreme_of(low, high);
  return {extreme, Lanes::mul(inverse_or_zero(extreme), Lanes::all(-256.0f * kSignedEnd))};
}

// Blocks of kQuads * 4 as words, and the codes' best scale in units of those. Codes are -half to half - 1, a
// step of them 2^kShift bytes; the scale has the sign that gives the extreme value the code -half.
template <int kBits, int kQuads, int kStride>
inline V fit_signed(const float* x, const SignedRange& range, FineValues<kQuads>& fine) {
  const Spread factor(range.factor);
  const V magic = Lanes::all(kMagic + kWordBias);
  for (int t = 0; t < kQuads; ++t) {
    V sums[kParts];
    for (int p = 0; p < kParts; ++p) {
      sums[p] = Lanes::fma(Lanes::load_part(x, kStride, t, p), factor.p[p], magic);
    }
    fine.set(t, sums);
  }
  constexpr int kCount = sizeof SignedSearch<kBits>::kAll / sizeof(Rounding);
  const Scale best = search_signed<kBits>(std::make_integer_sequence<int, kCount>(), fine);
  const V scale = Lanes::div(best.product, Lanes::max(best.sum, Lanes::all(1.0f)));
  return SignedSearch<kBits>::kWords ? scale : Lanes::mul(scale, Lanes::all(256.0f));
}

// Sums over a block's values and codes.
struct CodeSums {
  V xx, xq, qq;

  // Of (x - scale q)^2.
  V missed(V scale) const {
    const V twice = Lanes::add(xq, xq);
    const V gain = Lanes::mul(scale, Lanes::sub(twice, Lanes::mul(scale, qq)));
    return Lanes::max(Lanes::sub(xx, gain), Lanes::all(0.0f));
  }
};

// How words grow to where their upper bits are codes: by `more` of them, and by half a step.
struct Growth {
  Words more, half_step;
};

template <int kBits>
inline Growth growth_of(V times) {  // 0 to 2
  constexpr float kHalfStep = 32768 >> kBits, kOne = 32768.0f;
  return {block_words(Lanes::fma(times, Lanes::all(kOne), Lanes::all(-kOne))),
          block_words(Lanes::fma(times, Lanes::all(-kWordBias), Lanes::all(kHalfStep)))};
}

// Codes plus half: the upper bits of words, which saturate where codes do.
template <int kBits, int kQuads>
inline CodeSums code_signed(const FineValues<kQuads>& x, const Growth& growth, Bytes* quads) {
  constexpr int kShift = 8 - kBits;
  const Bytes half = Lanes::all_bytes(128 >> kShift);
  Ints high = Lanes::zero_ints(), low = high, squares = high;
  for (int t = 0; t < kQuads; ++t) {
    const Words steps = Lanes::add_saturated(Lanes::fma(x.word[t], growth.more, x.word[t]), growth.half_step);
    const Bytes q = Lanes::shift<kShift>(Lanes::high_bytes(steps));
    high = Lanes::dot_signed(high, q, x.high[t]);
    low = Lanes::dot_signed(low, x.low[t], q);
    squares = Lanes::dot_signed(squares, q, q);
    quads[t] = Lanes::add_saturated(q, half);
  }
  return {squares_of(x), Lanes::to_float(high, low), Lanes::to_float(squares)};
}

}  // namespace
}  // namespace millrace::quant::MILLRACE_TARGET
