// The gated activations of feed-forward blocks. The comparisons let NaN through, as the reference does.
#pragma once

#include "backend/cuda/ops/ops.h"

namespace millrace::cuda {

// 1 / (1 + exp(-x)) without a branch: an approximate reciprocal and one step of Newton's, right to the last
// bit or the one before.
__device__ inline float sigmoid(float x) {
  const float y = fminf(1.0f + expf(-x), 0x1p120f);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(y));
  return fmaf(r, fmaf(-y, r, 1.0f), r);
}

__device__ inline float activate(const Activation& op, float g, float u) {
  if (!op.clamped) return g * sigmoid(g) * u;
  g = op.limit < g ? op.limit : g;
  u = u < -op.limit ? -op.limit : (op.limit < u ? op.limit : u);
  return g * sigmoid(op.alpha * g) * (u + 1.0f);
}

}  // namespace millrace::cuda
