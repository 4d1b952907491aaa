// The gated activations of feed-forward blocks. The comparisons let NaN through, as the reference does.
#pragma once

#include "kernels/cuda/moe/activation.h"
#include "millrace/kernels/tile/ptx/approx.cuh"

namespace millrace::cuda {

// 1 / (1 + exp(-x)) without a branch: an approximate reciprocal and one step of Newton's, right to the last
// bit or the one before.
__device__ inline float sigmoid(float x) {
  const float y = fminf(1.0f + expf(-x), 0x1p120f);
  const float r = ptx::reciprocal_approx(y);
  return fmaf(r, fmaf(-y, r, 1.0f), r);
}

// kClamped is the activation's: known outside of a loop, its iterations overlap.
template <bool kClamped>
__device__ inline float activate_as(float alpha, float limit, float g, float u) {
  if constexpr (!kClamped) return g * sigmoid(g) * u;
  g = limit < g ? limit : g;
  float v = limit < u ? limit : u;
  v = u < -limit ? -limit : v;
  return g * sigmoid(alpha * g) * (v + 1.0f);
}
__device__ inline float activate(const Activation& op, float g, float u) {
  return op.clamped ? activate_as<true>(op.alpha, op.limit, g, u)
                    : activate_as<false>(op.alpha, op.limit, g, u);
}

}  // namespace millrace::cuda
