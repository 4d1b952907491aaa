// Elementwise. Roofline: memory.
#include "kernels/cuda/moe/gelu.h"

#include "kernels/cuda/moe/activation.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256;

__device__ inline float activate_kind(ActivationKind kind, float x) {
  if (kind == ActivationKind::kSilu) return x * sigmoid(x);
  if (kind == ActivationKind::kReluSquared) return x < 0.0f ? 0.0f : x * x;  // NaN stays
  // erfc keeps its digits where 1 + erf loses them: far below zero.
  if (kind == ActivationKind::kGelu) return 0.5f * x * erfcf(-0.70710678f * x);
  const float inner = 0.79788456f * fmaf(0.044715f * x * x, x, x);
  // 1 + tanh(y) = 2 / (1 + exp(-2 y)), which keeps its digits far below zero too.
  return x / (1.0f + expf(-2.0f * inner));
}

__global__ void __launch_bounds__(kThreads)
    gelu_kernel(ActivationKind kind, int64_t size, float* gate, const float* up) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    const float y = activate_kind(kind, gate[i]);
    gate[i] = up != nullptr ? y * up[i] : y;
  }
}

}  // namespace

void launch_gelu(ActivationKind kind, int64_t size, float* gate, const float* up, const Launch& at) {
  if (size == 0) return;
  constexpr int64_t kMaxBlocks = 1 << 20;  // beyond, a CTA takes several turns
  const int64_t blocks = (size + kThreads - 1) / kThreads;
  gelu_kernel<<<static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kThreads, 0, at.stream>>>(
      kind, size, gate, up);
  check_launch("gelu_kernel");
}

}  // namespace millrace::cuda
