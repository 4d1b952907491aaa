// Integer sums of kRows unpacked rows of weights with blocks of activations, a lane per row of weights
// (formats_x86.h).
//
// vpdpbusd multiplies unsigned by signed bytes and adds four products to a lane: weights are unpacked
// unsigned, kOffset too large, and -kOffset * (sum of the activations' codes) is what the sum starts from.
// Without it (AVX-512 as in Skylake) vpmaddubsw adds two products in 16 bits, where codes of four bits leave
// room for all eight registers of a run and codes of eight for one: those are multiplied by their magnitude,
// and the activation takes the sign. Every sum is exact, so all of them have the same bits.
//
// Operations a run and row of activations: 9 with vpdpbusd; without, 18 for four bits, 20 for five, 32 for
// eight. A sum is a chain of eight that takes five cycles each, more than a processor looks ahead: the rows
// of activations take turns, register by register.
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

// -kOffset times the sum of the activations' codes, of at most 32 x 127 (a word of its own), in every lane.
template <int kOffset>
[[gnu::always_inline]] inline V offset_sum(const ActivationBlock& x) {
  if constexpr (kOffset == 0) return zero();
  return multiply_words(dwords_of(x.sum), dwords_of(static_cast<uint16_t>(-kOffset)));
}

// dots<kM>(codes, x, run, sum): sum[i] is that of a run with x[i], where codes(j) gives its register j.
#if defined(MILLRACE_ROWS_DOT)

template <int kMaxCode, int kOffset>
struct RunOfCodes {
  static constexpr bool kSigned = false;  // how codes are unpacked for it

  template <int kM, class Codes>
  [[gnu::always_inline]] static void dots(const Codes& codes, const ActivationBlock* const* x, int64_t run,
                                          V* sum) {
    // A row or two by themselves are two chains each.
    constexpr int kChains = kM <= 2 ? 2 : 1;
    V more[kM];
    unroll<kM>([&](auto i) {
      sum[i] = offset_sum<kOffset>(x[i][run]);
      more[i] = zero();
    });
    unroll_constants<8>([&](auto j) {
      const V u = codes(j);
      unroll<kM>([&](auto i) {
        V& to = j % kChains == 0 ? sum[i] : more[i];
        to = lane::dot(to, u, four_codes(x[i][run], j));
      });
    });
    if constexpr (kChains == 2) unroll<kM>([&](auto i) { sum[i] = add32(sum[i], more[i]); });
  }
  // With an integer scale per half; the sum of the first half's codes is taken on the way.
  template <int kM, class Codes>
  [[gnu::always_inline]] static void dots_of_halves(const Codes& codes, const ActivationBlock* const* x,
                                                    int64_t run, V first, V second, V* sum) {
    unroll<kM>([&](auto i) {
      V a = zero(), b = offset_sum<kOffset>(x[i][run]), offset = a;
      unroll_constants<4>([&](auto j) {
        const V four = four_codes(x[i][run], j);
        a = lane::dot(a, codes(j), four);
        b = lane::dot(b, codes(Index<4 + j>{}), four_codes(x[i][run], 4 + j));
        offset = lane::dot(offset, bytes_of(kOffset), four);
      });
      sum[i] = add32(mul32(sub32(a, offset), first), mul32(add32(b, offset), second));
    });
  }
};

#else

template <int kMaxCode, int kOffset>
struct RunOfCodes {
  static constexpr bool kSigned = false;
  // Registers whose products fit 16 bits together.
  static constexpr int kFit = 32767 / (2 * 127 * kMaxCode), kTogether = kFit >= 8 ? 8 : kFit >= 4 ? 4 : 2;
  static_assert(kFit >= 2, "codes of so many bits take the other form");

  // Adds registers kFirst to kFirst + kCount - 1.
  template <int kFirst, int kCount, int kM, class Codes>
  [[gnu::always_inline]] static void add_products(const Codes& codes, const ActivationBlock* const* x,
                                                  int64_t run, V* sum) {
    V words[kM];
    unroll_constants<kCount>([&](auto at) {
      constexpr int j = kFirst + at;
      const V u = codes(Index<j>{});
      unroll<kM>([&](auto i) {
        const V products = multiply_pairs(u, four_codes(x[i][run], j));
        words[i] = at == 0 ? products : add16(words[i], products);
      });
    });
    unroll<kM>([&](auto i) {
      const V more = sum_pairs(words[i]);
      sum[i] = kCount == 8 ? more : add32(sum[i], more);
    });
  }
  template <int kM, class Codes>
  [[gnu::always_inline]] static void dots(const Codes& codes, const ActivationBlock* const* x, int64_t run,
                                          V* sum) {
    if constexpr (kTogether < 8) unroll<kM>([&](auto i) { sum[i] = zero(); });
    unroll_constants<8 / kTogether>(
        [&](auto part) { add_products<part * kTogether, kTogether, kM>(codes, x, run, sum); });
    // Last, for AVX2 has no register to keep it in.
    if constexpr (kOffset != 0)
      unroll<kM>([&](auto i) { sum[i] = add32(sum[i], offset_sum<kOffset>(x[i][run])); });
  }
  template <int kM, class Codes>
  [[gnu::always_inline]] static void dots_of_halves(const Codes& codes, const ActivationBlock* const* x,
                                                    int64_t run, V first, V second, V* sum) {
    static_assert(kTogether == 2 && 4 * 2 * 127 * kOffset <= 32767, "written for Q6_K");
    unroll<kM>([&](auto i) {
      const ActivationBlock* const row = x[i] + run;
      V words = zero();
      unroll_constants<4>(
          [&](auto j) { words = add16(words, multiply_pairs(bytes_of(kOffset), four_codes(*row, j))); });
      const V offset = sum_pairs(words);
      V a = sub32(zero(), offset), b = add32(offset_sum<kOffset>(*row), offset);
      add_products<0, 2, 1>(codes, &row, 0, &a);
      add_products<2, 2, 1>(codes, &row, 0, &a);
      add_products<4, 2, 1>(codes, &row, 0, &b);
      add_products<6, 2, 1>(codes, &row, 0, &b);
      sum[i] = add32(mul32(a, first), mul32(b, second));
    });
  }
};

// Eight bits, unpacked signed.
template <int kOffset>
struct RunOfCodes<255, kOffset> {
  static constexpr bool kSigned = true;

  template <int kM, class Codes>
  [[gnu::always_inline]] static void dots(const Codes& codes, const ActivationBlock* const* x, int64_t run,
                                          V* sum) {
    unroll_constants<8>([&](auto j) {
      const V code = codes(j), size = magnitude(code);
      const Sign sign = sign_of(code);
      unroll<kM>([&](auto i) {
        const V products = sum_pairs(multiply_pairs(size, with_sign(four_codes(x[i][run], j), sign)));
        sum[i] = j == 0 ? products : add32(sum[i], products);
      });
    });
  }
};

#endif

template <class Format>
using RunOf = RunOfCodes<Format::kMaxCode, Format::kOffset>;

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET::lane
