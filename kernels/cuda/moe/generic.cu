// Around the experts' products: top-k routing, their activation, and combining what they give.
#include "kernels/cuda/device.h"
#include "kernels/cuda/moe/activation.cuh"
#include "kernels/cuda/moe/moe.h"
#include "kernels/cuda/moe/top_k.cuh"
#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256;

// One warp per token.
__global__ void __launch_bounds__(kWarpLanes)
    route_top_k_kernel(const float* scores, int experts, int k, bool softmax_over_all, int32_t* chosen,
                       float* weights) {
  const int64_t t = blockIdx.x;
  route_top_k(scores + t * experts, experts, k, softmax_over_all, threadIdx.x, chosen + t * k,
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

// One CTA per token.
template <class Vector>
__global__ void __launch_bounds__(kThreads)
    combine_experts_kernel(const Vector* down, const float* weights, int k, int columns, Vector* residual) {
  constexpr int kLanes = sizeof(Vector) / sizeof(float);
  const int64_t t = blockIdx.x;
  for (int c = threadIdx.x; c < columns; c += kThreads) {
    float sum[kLanes] = {};
    for (int slot = 0; slot < k; ++slot) {
      const int64_t pair = t * k + slot;
      const Vector v = down[pair * columns + c];
      const float weight = weights[pair];
#pragma unroll
      for (int i = 0; i < kLanes; ++i) sum[i] = fmaf(weight, reinterpret_cast<const float*>(&v)[i], sum[i]);
    }
    Vector to = residual[t * columns + c];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) reinterpret_cast<float*>(&to)[i] += sum[i];
    residual[t * columns + c] = to;
  }
}

// CTAs for an elementwise loop; past the cap each takes several turns.
unsigned elementwise_grid(int64_t size) {
  constexpr int64_t kMaxBlocks = 1 << 20;
  const int64_t blocks = (size + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

}  // namespace

void launch_route_top_k(const float* scores, int64_t count, int experts, int k, bool softmax_over_all,
                        int32_t* chosen, float* weights, const Launch& at) {
  if (count == 0) return;
  route_top_k_kernel<<<static_cast<unsigned>(count), kWarpLanes, 0, at.stream>>>(
      scores, experts, k, softmax_over_all, chosen, weights);
  check_launch("route_top_k_kernel");
}

void launch_activate(const Activation& op, int64_t size, float* gate, const float* up, const Launch& at) {
  if (size == 0) return;
  activate_kernel<<<elementwise_grid(size), kThreads, 0, at.stream>>>(op, size, gate, up);
  check_launch("activate_kernel");
}

void launch_combine_experts(const float* down, const float* weights, int64_t count, int k, int64_t hidden,
                            float* residual, const Launch& at) {
  if (count == 0) return;
  const auto ctas = static_cast<unsigned>(count);
  if (hidden % 4 == 0) {
    combine_experts_kernel<<<ctas, kThreads, 0, at.stream>>>(reinterpret_cast<const float4*>(down), weights,
                                                             k, static_cast<int>(hidden / 4),
                                                             reinterpret_cast<float4*>(residual));
  } else {
    combine_experts_kernel<<<ctas, kThreads, 0, at.stream>>>(down, weights, k, static_cast<int>(hidden),
                                                             residual);
  }
  check_launch("combine_experts_kernel");
}

}  // namespace millrace::cuda
