// Activations of a row and their gradients.
#pragma once

#include "kernels/cpu/elementwise/elementwise.h"
#include "kernels/cpu/fused/float_rows.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// f(x) and f'(x)
struct WithSlope {
  V16 value, slope;
};

struct Gelu {
  static V16 value(V16 x) { return gelu16(x); }
  static WithSlope both(V16 x) {
    const V16 cdf = normal_cdf16(x);
    const V16 minus_half_square = Simd::mul(Simd::mul(x, Simd::broadcast(-0.5f)), x);
    const V16 density = Simd::mul(exp16_below(minus_half_square), Simd::broadcast(0.398942280f));
    return {Simd::mul(x, cdf), Simd::fma(x, density, cdf)};
  }
};

// x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
struct GeluTanh {
  static V16 value(V16 x) { return gelu_tanh16(x); }
  static WithSlope both(V16 x) {
    const V16 one = Simd::broadcast(1.0f), square = Simd::mul(x, x), factor = Simd::broadcast(1.59576912f);
    const V16 s =
        sigmoid16(Simd::mul(Simd::mul(factor, x), Simd::fma(square, Simd::broadcast(0.044715f), one)));
    const V16 slope_of_2u = Simd::mul(factor, Simd::fma(square, Simd::broadcast(0.134145f), one));
    const V16 value = Simd::mul(x, s);
    return {value, Simd::fma(Simd::mul(value, Simd::sub(one, s)), slope_of_2u, s)};
  }
};

struct Silu {
  static V16 value(V16 x) { return Simd::mul(x, sigmoid16(x)); }
  static WithSlope both(V16 x) {
    const V16 s = sigmoid16(x), value = Simd::mul(x, s);
    return {value, Simd::fma(value, Simd::sub(Simd::broadcast(1.0f), s), s)};
  }
};

template <class Function>
void unary_row(const ActivationRow& op) {
  map16_of(
      op.cols, op.y, [](V16 x) __attribute__((always_inline)) { return Function::value(x); }, op.x);
}
template <class Function>
void gated_row(const ActivationRow& op) {
  map16_of(
      op.cols, op.y,
      [](V16 x, V16 up) __attribute__((always_inline)) { return Simd::mul(Function::value(x), up); }, op.x,
      op.up);
}
template <class Function>
void unary_backward_row(const ActivationBackwardRow& op) {
  map16_of(
      op.cols, op.dx,
      [](V16 dy, V16 x) __attribute__((always_inline)) { return Simd::mul(dy, Function::both(x).slope); },
      op.dy, op.x);
}
template <class Function>
void gated_backward_row(const ActivationBackwardRow& op) {
  each16_of(op.cols, [&](const auto& part, int64_t i) {
    const WithSlope gate = Function::both(part.load(op.x, i));
    const V16 up = part.load(op.up, i), dy = part.load(op.dy, i);
    part.store(op.dx, i, Simd::mul(Simd::mul(dy, up), gate.slope));
    part.store(op.dup, i, Simd::mul(dy, gate.value));
  });
}

void clamped_row(const ActivationRow& op) {
  const V16 high = Simd::broadcast(op.limit), low = Simd::broadcast(-op.limit), one = Simd::broadcast(1.0f);
  const V16 alpha = Simd::broadcast(op.alpha);
  each16_of(op.cols, [&](const auto& part, int64_t i) {
    const V16 g = Simd::at_most(part.load(op.x, i), high);
    const V16 u = Simd::at_most(Simd::at_least(part.load(op.up, i), low), high);
    part.store(op.y, i, Simd::mul(Simd::mul(g, sigmoid16(Simd::mul(alpha, g))), Simd::add(u, one)));
  });
}
void clamped_backward_row(const ActivationBackwardRow& op) {
  const V16 high = Simd::broadcast(op.limit), low = Simd::broadcast(-op.limit), one = Simd::broadcast(1.0f);
  const V16 alpha = Simd::broadcast(op.alpha), zero = Simd::zero();
  each16_of(op.cols, [&](const auto& part, int64_t i) {
    const V16 x = part.load(op.x, i), up = part.load(op.up, i), dy = part.load(op.dy, i);
    const V16 g = Simd::at_most(x, high), u = Simd::at_most(Simd::at_least(up, low), high);
    const V16 s = sigmoid16(Simd::mul(alpha, g)), value = Simd::mul(g, s);
    const V16 slope = Simd::fma(Simd::mul(alpha, value), Simd::sub(one, s), s);
    const V16 dx = Simd::mul(Simd::mul(dy, Simd::add(u, one)), slope), dup = Simd::mul(dy, value);
    part.store(op.dx, i, Simd::select_less(high, x, zero, dx));
    part.store(op.dup, i, Simd::select_less(high, up, zero, Simd::select_less(up, low, zero, dup)));
  });
}

void activation_row(const ActivationRow& op) {
  switch (op.kind) {
    case MR_ACTIVATION_GELU:
      return unary_row<Gelu>(op);
    case MR_ACTIVATION_GELU_TANH:
      return unary_row<GeluTanh>(op);
    case MR_ACTIVATION_SILU:
      return unary_row<Silu>(op);
    case MR_ACTIVATION_SWIGLU:
      return gated_row<Silu>(op);
    case MR_ACTIVATION_CLAMPED_SWIGLU:
      return clamped_row(op);
    case MR_ACTIVATION_GEGLU:
      return gated_row<Gelu>(op);
    case MR_ACTIVATION_GEGLU_TANH:
      return gated_row<GeluTanh>(op);
  }
}
void activation_backward_row(const ActivationBackwardRow& op) {
  switch (op.kind) {
    case MR_ACTIVATION_GELU:
      return unary_backward_row<Gelu>(op);
    case MR_ACTIVATION_GELU_TANH:
      return unary_backward_row<GeluTanh>(op);
    case MR_ACTIVATION_SILU:
      return unary_backward_row<Silu>(op);
    case MR_ACTIVATION_SWIGLU:
      return gated_backward_row<Silu>(op);
    case MR_ACTIVATION_CLAMPED_SWIGLU:
      return clamped_backward_row(op);
    case MR_ACTIVATION_GEGLU:
      return gated_backward_row<Gelu>(op);
    case MR_ACTIVATION_GEGLU_TANH:
      return gated_backward_row<GeluTanh>(op);
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
