// Integer sums of kRows unpacked rows of weights with a block of activations, a lane per row
// (formats_x86.h).
//
// vpdpbusd multiplies unsigned by signed bytes and adds four products to a lane: weights are unpacked
// unsigned, kOffset too large, and -kOffset * (sum of the activations' codes) is what the sum starts from.
// Without it (AVX-512 as in Skylake) vpmaddubsw adds two products in 16 bits, where codes of four bits leave
// room for all eight registers of a run and codes of eight for one: those are multiplied by their magnitude,
// and the activation takes the sign. Every sum is exact, so all of them have the same bits.
//
// Operations a run and row of activations: 9 with vpdpbusd; without, 17 for four bits, 19 for five, 33 for
// eight.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/matmul/formats_x86.h"
#include "kernels/cpu/matmul/panel.h"
#include "kernels/cpu/simd/rows_x86.h"
#include "kernels/cpu/simd/unroll.h"

namespace millrace::cpu::MILLRACE_TARGET::lane {
namespace {

// Four bytes of activations in every lane: folds into the instruction that uses them.
inline V four_codes(const ActivationBlock& x, int j) {
  int32_t four;
  __builtin_memcpy(&four, x.q + 4 * j, 4);
  return dwords_of(four);
}

#if defined(MILLRACE_ROWS_DOT)

// A run of kRows rows, ready for products with any number of rows of activations.
template <int kMaxCode, int kOffset>
struct RunOfCodes {
  static constexpr bool kSigned = false;  // how codes are unpacked for it
  V u[8];

  [[gnu::always_inline]] void prepare() {}
  // Two chains: vpdpbusd takes five cycles.
  [[gnu::always_inline]] V dot(const ActivationBlock& x) const {
    V a = dwords_of(-kOffset * x.sum), b = zero();
    unroll<4>([&](auto j) {
      a = lane::dot(a, u[j], four_codes(x, j));
      b = lane::dot(b, u[4 + j], four_codes(x, 4 + j));
    });
    return add32(a, b);
  }
  // With an integer scale per half; the sums of the halves' codes are taken on the way.
  [[gnu::always_inline]] V dot_halves(const ActivationBlock& x, V first, V second) const {
    V a = zero(), b = a, a_sum = a, b_sum = a;
    unroll<4>([&](auto j) {
      const V xa = four_codes(x, j), xb = four_codes(x, 4 + j);
      a = lane::dot(a, u[j], xa);
      b = lane::dot(b, u[4 + j], xb);
      a_sum = lane::dot(a_sum, bytes_of(kOffset), xa);
      b_sum = lane::dot(b_sum, bytes_of(kOffset), xb);
    });
    return add32(mul32(sub32(a, a_sum), first), mul32(sub32(b, b_sum), second));
  }
};

#else

template <int kMaxCode, int kOffset>
struct RunOfCodes {
  static constexpr bool kSigned = false;
  // Registers whose products fit 16 bits together.
  static constexpr int kFit = 32767 / (2 * 127 * kMaxCode), kTogether = kFit >= 8 ? 8 : kFit >= 4 ? 4 : 2;
  static_assert(kFit >= 2, "codes of so many bits take the other form");
  V u[8];

  [[gnu::always_inline]] void prepare() {}
  template <int kFirst, int kCount>
  [[gnu::always_inline]] V products(const ActivationBlock& x) const {
    V words = multiply_pairs(u[kFirst], four_codes(x, kFirst));
    unroll<kCount - 1>([&](auto i) {
      constexpr int j = kFirst + 1 + i;
      words = add16(words, multiply_pairs(u[j], four_codes(x, j)));
    });
    return sum_pairs(words);
  }
  [[gnu::always_inline]] V dot(const ActivationBlock& x) const {
    V sum = dwords_of(-kOffset * x.sum);
    unroll<8 / kTogether>([&](auto i) { sum = add32(sum, products<i * kTogether, kTogether>(x)); });
    return sum;
  }
  // kOffset times the activations' codes, of registers kFirst to kFirst + 3.
  template <int kFirst>
  [[gnu::always_inline]] static V offsets(const ActivationBlock& x) {
    static_assert(4 * 2 * 127 * kOffset <= 32767);
    V words = multiply_pairs(bytes_of(kOffset), four_codes(x, kFirst));
    unroll<3>([&](auto i) {
      const V more = multiply_pairs(bytes_of(kOffset), four_codes(x, kFirst + 1 + i));
      words = add16(words, more);
    });
    return sum_pairs(words);
  }
  [[gnu::always_inline]] V dot_halves(const ActivationBlock& x, V first, V second) const {
    static_assert(kTogether == 2, "written for Q6_K");
    const V a = add32(products<0, 2>(x), products<2, 2>(x));
    const V b = add32(products<4, 2>(x), products<6, 2>(x));
    return add32(mul32(sub32(a, offsets<0>(x)), first), mul32(sub32(b, offsets<4>(x)), second));
  }
};

// Eight bits, unpacked signed.
template <int kOffset>
struct RunOfCodes<255, kOffset> {
  static constexpr bool kSigned = true;
  V u[8];
  Sign sign[8];

  [[gnu::always_inline]] void prepare() {
    unroll<8>([&](auto j) {
      sign[j] = sign_of(u[j]);
      u[j] = magnitude(u[j]);
    });
  }
  [[gnu::always_inline]] V dot(const ActivationBlock& x) const {
    V a = zero(), b = a;
    unroll<4>([&](auto j) {
      a = add32(a, sum_pairs(multiply_pairs(u[j], with_sign(four_codes(x, j), sign[j]))));
      b = add32(b, sum_pairs(multiply_pairs(u[4 + j], with_sign(four_codes(x, 4 + j), sign[4 + j]))));
    });
    return add32(a, b);
  }
};

#endif

template <class Format>
using RunOf = RunOfCodes<Format::kMaxCode, Format::kOffset>;

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET::lane
