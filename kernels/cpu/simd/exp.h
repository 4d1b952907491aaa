// exp of sixteen floats, a polynomial of our own in fused multiply-adds: the same bits with every instruction
// set.
#pragma once

#include "kernels/cpu/simd/simd.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// exp to 1.5 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial of degree 6 in r, n into the exponent.
// Below -86 it is 0, above 88 it stays at exp(88).
struct ExpParts {
  V16 p, shifted;  // exp(r), and n in the last bits
};
struct Constant {
  alignas(16) float lanes[4];
};
constexpr Constant constant(float x) { return {{x, x, x, x}}; }
struct ExpConstants {
  float log2_e = 1.44269504f, minus_ln2_high = -0.693359375f, minus_ln2_low = 2.12194440e-4f,
        sixth = 1.3888889e-3f;
  Constant magic = constant(12582912.0f);  // 1.5 * 2^23: the sum's last bit is worth 1
  Constant fifth = constant(8.3333333e-3f), fourth = constant(4.16666667e-2f),
           third = constant(1.66666667e-1f), half = constant(0.5f), one = constant(1.0f);
};
inline constexpr ExpConstants kExp;
// x * y + a constant. On ARM a sum takes the place of its addend: it comes from memory every time, for a copy
// of a register would take a vector unit.
template <class S = Simd>
[[gnu::always_inline]] inline V16 fma_constant(V16 x, V16 y, const Constant& z) {
  if constexpr (requires { S::fma_constant(x, y, z.lanes); }) {
    return S::fma_constant(x, y, z.lanes);
  } else {
    return Simd::fma(x, y, Simd::broadcast(z.lanes[0]));
  }
}
[[gnu::always_inline]] inline ExpParts exp_parts(V16 bounded) {
  const V16 shifted = fma_constant(bounded, Simd::broadcast(kExp.log2_e), kExp.magic);
  const V16 n = Simd::sub(shifted, Simd::broadcast(kExp.magic.lanes[0]));
  V16 r = Simd::fma(n, Simd::broadcast(kExp.minus_ln2_high), bounded);
  r = Simd::fma(n, Simd::broadcast(kExp.minus_ln2_low), r);
  V16 p = fma_constant(Simd::broadcast(kExp.sixth), r, kExp.fifth);
  p = fma_constant(p, r, kExp.fourth);
  p = fma_constant(p, r, kExp.third);
  p = fma_constant(p, r, kExp.half);
  p = fma_constant(p, r, kExp.one);
  p = fma_constant(p, r, kExp.one);
  return {p, shifted};
}
// a < b ? 0 : y * 2^n, as in add_exponent
template <class S = Simd>
[[gnu::always_inline]] inline V16 zero_if_less(V16 a, V16 b, V16 y, V16 magic) {
  if constexpr (requires { S::zero_if_less(a, b, y, magic); }) {
    return S::zero_if_less(a, b, y, magic);
  } else {
    return Simd::zero_if_less(a, b, Simd::add_exponent(y, magic));
  }
}
inline V16 exp16(V16 x) {
  const V16 low = Simd::broadcast(-86.0f);
  const auto [p, shifted] = exp_parts(Simd::at_most(Simd::at_least(x, low), Simd::broadcast(88.0f)));
  return zero_if_less(x, low, p, shifted);
}

// The same, but exp(-86) below -86: for what 1 is added to.
inline V16 exp16_within(V16 x) {
  const auto [p, shifted] =
      exp_parts(Simd::at_most(Simd::at_least(x, Simd::broadcast(-86.0f)), Simd::broadcast(88.0f)));
  return Simd::add_exponent(p, shifted);
}

// exp16 of numbers that are not above 88.
struct FullExp {
  [[gnu::always_inline]] static ExpParts parts(V16 bounded) { return exp_parts(bounded); }
};
template <class Exp = FullExp>
[[gnu::always_inline]] inline V16 exp16_below(V16 x) {
  const V16 low = Simd::broadcast(-86.0f);
  const auto [p, shifted] = Exp::parts(Simd::at_least(x, low));
  return zero_if_less(x, low, p, shifted);
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
