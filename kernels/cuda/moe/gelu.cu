// Elementwise. Roofline: memory.
#include "kernels/cuda/moe/gelu.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256;

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
