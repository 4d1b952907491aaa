// The gated activations of feed-forward blocks. The comparisons let NaN through, as the reference does.
#pragma once

#include "backend/cuda/ops/ops.h"

namespace millrace::cuda {

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ inline float activate(const Activation& op, float g, float u) {
  if (!op.clamped) return g * sigmoid(g) * u;
  g = op.limit < g ? op.limit : g;
  u = u < -op.limit ? -op.limit : (op.limit < u ? op.limit : u);
  return g * sigmoid(op.alpha * g) * (u + 1.0f);
}

}  // namespace millrace::cuda
