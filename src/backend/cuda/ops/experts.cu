// Around the experts' products: choosing them, their activation, and adding up what they say.
#include "backend/cuda/device.h"
#include "backend/cuda/ops/activation.cuh"
#include "backend/cuda/ops/choose.cuh"
#include "backend/cuda/ops/ops.h"
#include "backend/cuda/ops/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256;

// One warp per token.
__global__ void __launch_bounds__(kWarpLanes)
    choose_experts_kernel(const float* scores, int experts, int k, bool softmax_over_all, int32_t* chosen,
                          float* weights) {
  const int64_t t = blockIdx.x;
  choose_experts(scores + t * experts, experts, k, softmax_over_all, threadIdx.x, chosen + t * k,
                 weights + t * k);
}

// gate, up: [size].
__global__ void __launch_bounds__(kThreads)
    activate_kernel(Activation op, int64_t size, float* gate, const float* up) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    gate[i] = activate(op, gate[i], up[i]);
  }
}

// One thread per element of the residual.
__global__ void __launch_bounds__(kThreads)
    combine_experts_kernel(const float* down, const float* weights, int64_t size, int k, int64_t hidden,
                           float* residual) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t t = i / hidden, c = i % hidden;
    float sum = 0.0f;
    for (int slot = 0; slot < k; ++slot) {
      const int64_t pair = t * k + slot;
      sum = fmaf(weights[pair], down[pair * hidden + c], sum);
    }
    residual[i] += sum;
  }
}

// CTAs for an elementwise loop; past the cap each takes several turns.
unsigned elementwise_grid(int64_t size) {
  constexpr int64_t kMaxBlocks = 1 << 20;
  const int64_t blocks = (size + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

}  // namespace

void launch_choose_experts(const float* scores, int64_t count, int experts, int k, bool softmax_over_all,
                           int32_t* chosen, float* weights, cudaStream_t stream) {
  if (count == 0) return;
  choose_experts_kernel<<<static_cast<unsigned>(count), kWarpLanes, 0, stream>>>(
      scores, experts, k, softmax_over_all, chosen, weights);
  check_launch("choose_experts_kernel");
}

void launch_activate(const Activation& op, int64_t size, float* gate, const float* up, cudaStream_t stream) {
  if (size == 0) return;
  activate_kernel<<<elementwise_grid(size), kThreads, 0, stream>>>(op, size, gate, up);
  check_launch("activate_kernel");
}

void launch_combine_experts(const float* down, const float* weights, int64_t count, int k, int64_t hidden,
                            float* residual, cudaStream_t stream) {
  if (count == 0) return;
  const int64_t size = count * hidden;
  combine_experts_kernel<<<elementwise_grid(size), kThreads, 0, stream>>>(down, weights, size, k, hidden,
                                                                          residual);
  check_launch("combine_experts_kernel");
}

}  // namespace millrace::cuda
