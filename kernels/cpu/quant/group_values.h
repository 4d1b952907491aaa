// The values of a group of blocks as the integer searches take them: rounded to words of sixteen bits in
// proportion to each block's range, and to the upper bytes of those; and the roundings to codes that are
// tried.
//
// A rounding to codes is fixed by an inverse scale (and an offset); once the codes are known the best scale
// (and minimum) for them is a least-squares problem with a closed solution, and so is its error. Each search
// (search_scale.h, search_scale_min.h) tries some roundings and keeps the one of least error. It runs on
// words or on bytes, in which a step of the codes is a power of two: another scale is then the values and
// some 2^-k of them, added with saturation at the ends of the codes' range, and the code is what a shift
// leaves. For bytes that is four or five instructions for sixteen or thirty-two values, dot products
// included, and every sum is exact and so the same everywhere. By the scale found the codes are rounded
// again, from words, and by dot products it is known what they miss.
//
// The roundings tried were picked for what they leave of the error of Gaussian blocks, of heavy-tailed ones
// (Student's t, 4 degrees), of a trained model's and of one stored as q4_1: one by one, and each again beside
// all the others.
#pragma once

#include <type_traits>

#include "kernels/cpu/simd/lanes.h"

namespace millrace::quant::MILLRACE_TARGET {
namespace {

using Lanes = cpu::MILLRACE_TARGET::Lanes;
using V = Lanes::V;
using Bytes = Lanes::Bytes;
using Ints = Lanes::Ints;
using Words = Lanes::Words;
constexpr int kParts = 4;

// Below this a block's range is none: no scale of f16 is that small, and its inverse stays finite.
constexpr float kLeastRange = 1e-30f;

// 1.5 * 2^23: a sum with it has no bits left below one, and its lower bits are the integer.
constexpr float kMagic = 12582912.0f;

// A number per block, spread over the parts.
struct Spread {
  V p[kParts];
  explicit Spread(V x)
      : p{Lanes::spread<0>(x), Lanes::spread<1>(x), Lanes::spread<2>(x), Lanes::spread<3>(x)} {}
};

inline V inverse_or_zero(V x) {
  const V zero = Lanes::all(0.0f);
  const Lanes::Mask good = Lanes::greater(Lanes::abs(x), Lanes::all(kLeastRange));
  return Lanes::select(good, Lanes::div(Lanes::all(1.0f), Lanes::select(good, x, Lanes::all(1.0f))), zero);
}

// Least and largest value of each block of kQuads * 4 elements; the blocks of a group lie kStride apart.
template <int kQuads, int kStride>
inline void find_ends(const float* x, V& low, V& high) {
  V lowest[kParts], highest[kParts];
  for (int p = 0; p < kParts; ++p) {
    lowest[p] = highest[p] = Lanes::load_part(x, kStride, 0, p);
    for (int t = 1; t < kQuads; ++t) {
      const V v = Lanes::load_part(x, kStride, t, p);
      lowest[p] = Lanes::min(lowest[p], v);
      highest[p] = Lanes::max(highest[p], v);
    }
  }
  low = Lanes::min_across(lowest);
  high = Lanes::max_across(highest);
}

// The end further from zero: 0 for a block of zeros.
inline V extreme_of(V low, V high) {
  return Lanes::select(Lanes::greater(high, Lanes::sub(Lanes::all(0.0f), low)), high, low);
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
    word[t] = Lanes::words(sums);
    Lanes::split(word[t], high[t], low[t]);
  }
};
constexpr float kWordBias = 128.0f;

template <int kTerm, class T>
inline T with_part(T x, T sum) {
  if constexpr (kTerm > 0) return Lanes::add_saturated(sum, Lanes::round_shift<kTerm>(x));
  if constexpr (kTerm < 0) return Lanes::sub_saturated(sum, Lanes::round_shift<-kTerm>(x));
  return sum;
}

// Codes of values x, bytes or words, of which one step is 2^kShift (upper) bytes; from `start`.
template <int kShift, int kFirst, int kSecond, class T>
inline Bytes rounded(T x, T start) {
  const T sum = with_part<kSecond>(x, with_part<kFirst>(x, start));
  if constexpr (std::is_same_v<T, Words>) {
    return Lanes::shift<kShift>(Lanes::high_bytes(sum));
  } else {
    return Lanes::shift<kShift>(sum);
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

// The sum of the squares of a block's words.
template <int kQuads>
inline V squares_of(const FineValues<kQuads>& x) {
  Ints high = Lanes::zero_ints(), cross = high, low = high;
  for (int t = 0; t < kQuads; ++t) {
    high = Lanes::dot_signed(high, x.high[t], x.high[t]);
    cross = Lanes::dot_signed(cross, x.low[t], x.high[t]);
    low = Lanes::add_squares(low, x.low[t]);
  }
  const V rest = Lanes::fma(Lanes::to_float(cross), Lanes::all(512.0f), Lanes::to_float(low));
  return Lanes::fma(Lanes::to_float(high), Lanes::all(65536.0f), rest);
}

// Numbers of each block as words beside those of its values.
inline Words block_words(V x) {
  const Spread sums(
      Lanes::add(Lanes::min(Lanes::max(x, Lanes::all(-32768.0f)), Lanes::all(32767.0f)), Lanes::all(kMagic)));
  return Lanes::words(sums.p);
}

}  // namespace
}  // namespace millrace::quant::MILLRACE_TARGET
