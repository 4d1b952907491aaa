// Around the experts' products: choosing them, their activation, and adding up what they say.
#include <climits>

#include "backend/cuda/device.h"
#include "backend/cuda/ops/ops.h"
#include "backend/cuda/ops/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256;

struct Candidate {
  float key;
  int32_t expert;
};

// Larger keys first, the lower index among equals: a total order, so any order of comparing finds the same
// one.
__device__ inline bool before(Candidate a, Candidate b) {
  return a.key > b.key || (a.key == b.key && a.expert < b.expert);
}

// One warp per token. Each turn finds the first candidate after the one chosen last.
__global__ void __launch_bounds__(kWarpLanes)
    choose_experts_kernel(const float* scores, int experts, int k, bool softmax_over_all, int32_t* chosen,
                          float* weights) {
  const int64_t t = blockIdx.x;
  const int lane = threadIdx.x;
  const float* score = scores + t * experts;
  Candidate last{INFINITY, -1};
  float top = 0.0f, chosen_sum = 0.0f;
  for (int slot = 0; slot < k; ++slot) {
    Candidate best{-INFINITY, INT_MAX};
    for (int e = lane; e < experts; e += kWarpLanes) {
      const Candidate candidate{isnan(score[e]) ? -INFINITY : score[e], e};
      if (before(last, candidate) && before(candidate, best)) best = candidate;
    }
#pragma unroll
    for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
      const Candidate other{__shfl_xor_sync(kAllLanes, best.key, distance),
                            __shfl_xor_sync(kAllLanes, best.expert, distance)};
      if (before(other, best)) best = other;
    }
    last = best;  // in every lane alike; k <= experts, so there was one
    const float value = score[best.expert];
    if (slot == 0) top = value;
    const float weight = expf(value - top);
    chosen_sum += weight;
    if (lane == 0) {
      chosen[t * k + slot] = best.expert;
      weights[t * k + slot] = weight;
    }
  }
  float sum = chosen_sum;
  if (softmax_over_all) {
    sum = 0.0f;
    for (int e = lane; e < experts; e += kWarpLanes) sum += expf(score[e] - top);
    sum = warp_sum(sum);
  }
  if (lane == 0) {
    for (int slot = 0; slot < k; ++slot) weights[t * k + slot] /= sum;
  }
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// gate, up: [size]. The comparisons let NaN through, as the reference does.
__global__ void __launch_bounds__(kThreads)
    activate_kernel(Activation op, int64_t size, float* gate, const float* up) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    float g = gate[i], u = up[i];
    if (op.clamped) {
      g = op.limit < g ? op.limit : g;
      u = u < -op.limit ? -op.limit : (op.limit < u ? op.limit : u);
      gate[i] = g * sigmoid(op.alpha * g) * (u + 1.0f);
    } else {
      gate[i] = g * sigmoid(g) * u;
    }
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
