// Activations of one value.
#pragma once

#include "kernels/cuda/moe/activation.cuh"
#include "kernels/cuda/moe/gelu.h"

namespace millrace::cuda {

__device__ inline float activate_kind(ActivationKind kind, float x) {
  if (kind == ActivationKind::kSilu) return x * sigmoid(x);
  if (kind == ActivationKind::kReluSquared) return x < 0.0f ? 0.0f : x * x;  // NaN stays
  // erfc keeps its digits where 1 + erf loses them: far below zero.
  if (kind == ActivationKind::kGelu) return 0.5f * x * erfcf(-0.70710678f * x);
  const float inner = 0.79788456f * fmaf(0.044715f * x * x, x, x);
  // 1 + tanh(y) = 2 / (1 + exp(-2 y)), which keeps its digits far below zero too.
  return x / (1.0f + expf(-2.0f * inner));
}

}  // namespace millrace::cuda
