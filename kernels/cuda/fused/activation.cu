// Activations of rows and their gradients, dropout, and embedding rows: every eight columns alike
// (each_row.cuh).
#include <type_traits>

#include "kernels/cuda/fused/each_row.cuh"
#include "kernels/cuda/fused/fused.h"
#include "millrace/kernels/tile/ptx/approx.cuh"

namespace millrace::cuda {
namespace {

// f(x) and f'(x)
struct WithSlope {
  float value, slope;
};

// Phi(-|x|) = erfc(|x| / sqrt(2)) / 2 by Abramowitz and Stegun 7.1.26, to 1e-7: with two approximations of
// the special function unit a third of erff's instructions. The density of the slope is its factor.
__device__ inline WithSlope gelu(float x) {
  const float magnitude = fabsf(x);
  const float t = ptx::reciprocal_approx(fmaf(magnitude, 0.3275911f * 0.70710678f, 1.0f));
  float q = fmaf(0.5f * 1.061405429f, t, 0.5f * -1.453152027f);
  q = fmaf(q, t, 0.5f * 1.421413741f);
  q = fmaf(q, t, 0.5f * -0.284496736f);
  q = fmaf(q, t, 0.5f * 0.254829592f) * t;
  const float e = ptx::exp2_approx(x * x * -0.72134752f);  // e^(-x^2 / 2)
  const float below = q * e, phi = x < 0.0f ? below : 1.0f - below;
  return {x * phi, fmaf(x * 0.398942280f, e, phi)};
}
// 1 / (1 + e^-x): as moe/activation.cuh's, with the special function unit's power of two.
__device__ inline float sigmoid_by_exp2(float x) {
  const float y = fminf(1.0f + ptx::exp2_approx(x * -1.44269504f), 0x1p120f);
  const float r = ptx::reciprocal_approx(y);
  return fmaf(r, fmaf(-y, r, 1.0f), r);
}
// x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
__device__ inline WithSlope gelu_tanh(float x) {
  const float square = x * x;
  const float s = sigmoid_by_exp2(1.59576912f * x * fmaf(0.044715f, square, 1.0f));
  const float slope_of_2u = 1.59576912f * fmaf(0.134145f, square, 1.0f);
  return {x * s, fmaf(x * s * (1.0f - s), slope_of_2u, s)};
}
__device__ inline WithSlope silu(float x, float alpha = 1.0f) {
  const float s = sigmoid_by_exp2(alpha * x);
  return {x * s, fmaf(alpha * x * s, 1.0f - s, s)};
}

template <mr_activation_kind kKind>
__device__ inline WithSlope of_gate(float x, float alpha, float limit) {
  if constexpr (kKind == MR_ACTIVATION_GELU || kKind == MR_ACTIVATION_GEGLU) return gelu(x);
  if constexpr (kKind == MR_ACTIVATION_GELU_TANH || kKind == MR_ACTIVATION_GEGLU_TANH) return gelu_tanh(x);
  if constexpr (kKind == MR_ACTIVATION_CLAMPED_SWIGLU) {
    const bool beyond = x > limit;
    WithSlope of = silu(beyond ? limit : x, alpha);
    if (beyond) of.slope = 0.0f;
    return of;
  }
  return silu(x);
}
// up as it is multiplied, and its slope
template <mr_activation_kind kKind>
__device__ inline WithSlope of_up(float up, float limit) {
  if constexpr (kKind != MR_ACTIVATION_CLAMPED_SWIGLU) return {up, 1.0f};
  if (up > limit) return {limit + 1.0f, 0.0f};
  if (up < -limit) return {1.0f - limit, 0.0f};
  return {up + 1.0f, 1.0f};
}

template <mr_activation_kind kKind, Form kKnown>
struct ActivationOp {
  static constexpr Form kForm = kKnown;
  static constexpr bool kGated = kKind >= MR_ACTIVATION_SWIGLU;
  Rows x, up, y;
  float alpha, limit;
  struct Loaded {
    Raw8 x, up;
  };
  __device__ Loaded load(int64_t row, int64_t col, int n) const {
    Loaded l;
    l.x = load8<kForm>(x, row, col, n);
    if constexpr (kGated) l.up = load8<kForm>(up, row, col, n);
    return l;
  }
  __device__ void finish(const Loaded& l, int64_t row, int64_t col, int n) const {
    Values8 v = to_float<kForm>(x, l.x), u{};
    if constexpr (kGated) u = to_float<kForm>(up, l.up);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      v.v[i] = of_gate<kKind>(v.v[i], alpha, limit).value;
      if constexpr (kGated) v.v[i] *= of_up<kKind>(u.v[i], limit).value;
    }
    store8<kForm>(y, row, col, n, v);
  }
};

template <mr_activation_kind kKind>
struct ActivationBackwardOp {
  static constexpr bool kGated = kKind >= MR_ACTIVATION_SWIGLU;
  Rows x, up, dy, dx, dup;
  float alpha, limit;
  struct Loaded {
    Raw8 x, up, dy;
  };
  __device__ Loaded load(int64_t row, int64_t col, int n) const {
    Loaded l;
    l.x = load8(x, row, col, n);
    l.dy = load8(dy, row, col, n);
    if constexpr (kGated) l.up = load8(up, row, col, n);
    return l;
  }
  __device__ void finish(const Loaded& l, int64_t row, int64_t col, int n) const {
    const Values8 v = to_float(x, l.x), d = to_float(dy, l.dy);
    Values8 u{}, to_x, to_up;
    if constexpr (kGated) u = to_float(up, l.up);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const WithSlope gate = of_gate<kKind>(v.v[i], alpha, limit);
      if constexpr (kGated) {
        const WithSlope by = of_up<kKind>(u.v[i], limit);
        to_x.v[i] = d.v[i] * by.value * gate.slope;
        to_up.v[i] = d.v[i] * gate.value * by.slope;
      } else {
        to_x.v[i] = d.v[i] * gate.slope;
      }
    }
    store8(dx, row, col, n, to_x);
    if constexpr (kGated) store8(dup, row, col, n, to_up);
  }
};

// f(std::integral_constant of the kind)
template <class F>
void with_kind(mr_activation_kind kind, F&& f) {
  switch (kind) {
    case MR_ACTIVATION_GELU:
      return f(std::integral_constant<mr_activation_kind, MR_ACTIVATION_GELU>{});
    case MR_ACTIVATION_GELU_TANH:
      return f(std::integral_constant<mr_activation_kind, MR_ACTIVATION_GELU_TANH>{});
    case MR_ACTIVATION_SILU:
      return f(std::integral_constant<mr_activation_kind, MR_ACTIVATION_SILU>{});
    case MR_ACTIVATION_SWIGLU:
      return f(std::integral_constant<mr_activation_kind, MR_ACTIVATION_SWIGLU>{});
    case MR_ACTIVATION_CLAMPED_SWIGLU:
      return f(std::integral_constant<mr_activation_kind, MR_ACTIVATION_CLAMPED_SWIGLU>{});
    case MR_ACTIVATION_GEGLU:
      return f(std::integral_constant<mr_activation_kind, MR_ACTIVATION_GEGLU>{});
    case MR_ACTIVATION_GEGLU_TANH:
      return f(std::integral_constant<mr_activation_kind, MR_ACTIVATION_GEGLU_TANH>{});
  }
}

}  // namespace

void launch_activation(const mr_activation_args& args, const Launch& at) {
  const Rows x = rows_of(args.x), up = rows_of(args.up), y = rows_of(args.y);
  const bool plain = args.cols % kColumns == 0 && is_plain_bf16(x) && is_plain_bf16(up) && is_plain_bf16(y);
  with_kind(args.kind, [&](auto kind) {
    const auto launch = [&](auto form) {
      const ActivationOp<decltype(kind)::value, decltype(form)::value> op{x, up, y, args.alpha, args.limit};
      launch_each_row("activation", op, args.rows, args.cols, at);
    };
    plain ? launch(std::integral_constant<Form, Form::kBf16>{})
          : launch(std::integral_constant<Form, Form::kAny>{});
  });
}

void launch_activation_backward(const mr_activation_backward_args& args, const Launch& at) {
  with_kind(args.kind, [&](auto kind) {
    const ActivationBackwardOp<decltype(kind)::value> op{
        rows_of(args.x),   rows_of(args.up), rows_of(args.dy), rows_of(args.dx),
        rows_of(args.dup), args.alpha,       args.limit};
    launch_each_row("activation backward", op, args.rows, args.cols, at);
  });
}

}  // namespace millrace::cuda
