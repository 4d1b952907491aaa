// tanh and the two GELUs of sixteen floats, from exp: the same bits with every instruction set.
#pragma once

#include "kernels/cpu/simd/exp.h"
#include "kernels/cpu/simd/simd.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// 1 - 2 / (exp(2 |x|) + 1) with the sign of x; below 0.25, where that cancels, x times a polynomial in x^2
// (the series of tanh to x^11). To 2e-7 of the result.
inline V16 tanh16(V16 x) {
  const V16 one = Simd::broadcast(1.0f), two = Simd::broadcast(2.0f);
  const V16 size = Simd::abs(x), square = Simd::mul(x, x);
  V16 p = Simd::broadcast(-8.86323553e-3f);
  p = Simd::fma(p, square, Simd::broadcast(2.18694885e-2f));
  p = Simd::fma(p, square, Simd::broadcast(-5.39682540e-2f));
  p = Simd::fma(p, square, Simd::broadcast(1.33333333e-1f));
  p = Simd::fma(p, square, Simd::broadcast(-3.33333333e-1f));
  const V16 near = Simd::fma(Simd::mul(p, square), x, x);
  const V16 far = Simd::sub(one, Simd::div(two, Simd::add(exp16(Simd::mul(two, size)), one)));
  const V16 signed_far = Simd::select_less(x, Simd::zero(), Simd::sub(Simd::zero(), far), far);
  return Simd::select_less(size, Simd::broadcast(0.25f), near, signed_far);
}

// cap * tanh(x / cap)
inline V16 softcap16(V16 x, float cap) {
  return Simd::mul(tanh16(Simd::div(x, Simd::broadcast(cap))), Simd::broadcast(cap));
}

// x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) = x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
inline V16 gelu_tanh16(V16 x) {
  const V16 one = Simd::broadcast(1.0f);
  const V16 cubic = Simd::fma(Simd::mul(x, Simd::broadcast(0.044715f)), Simd::mul(x, x), x);
  const V16 by = Simd::mul(cubic, Simd::broadcast(-1.59576912f));
  return Simd::div(x, Simd::add(one, exp16_within(by)));
}

// Phi(x) = erfc(-x / sqrt(2)) / 2. For z >= 0, erfc(z) = t * exp(-z^2 + P(t)) with t = 2 / (2 +
// z); P, of degree 9, is fitted at Chebyshev's nodes for z in [0, 12]: the formula's relative error is 6e-8,
// so that the tails are right too.
inline constexpr Constant kErfcRest[] = {
    constant(-0.750181556f), constant(1.31865299f),    constant(-0.909740686f),
    constant(0.0943214297f), constant(-0.0902556628f), constant(0.0652326494f),
    constant(0.380354136f),  constant(0.999348104f),   constant(-1.26548231f)};
inline V16 normal_cdf16(V16 x) {
  const V16 one = Simd::broadcast(1.0f), half = Simd::broadcast(0.5f);
  const V16 z = Simd::mul(Simd::abs(x), Simd::broadcast(0.707106781f));
  const V16 t = Simd::div(one, Simd::fma(half, z, one));
  V16 p = Simd::broadcast(0.157751009f);
  for (const Constant& c : kErfcRest) p = fma_constant(p, t, c);
  const V16 tail = Simd::mul(Simd::mul(t, half), exp16_below(Simd::sub(p, Simd::mul(z, z))));  // Phi(-|x|)
  return Simd::select_less(x, Simd::zero(), tail, Simd::sub(one, tail));
}
inline V16 gelu16(V16 x) { return Simd::mul(x, normal_cdf16(x)); }

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
