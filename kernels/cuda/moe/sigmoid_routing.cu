// One warp per token routes, from shared memory; one CTA per row weighs and mixes.
#include "kernels/cuda/moe/sigmoid_routing.h"

#include "kernels/cuda/moe/activation.cuh"
#include "kernels/cuda/moe/top_k.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256;

// The two largest of keys [count], added; of one, or with `one`, the largest.
__device__ inline float two_largest(const float* keys, int count, bool one) {
  float first = -INFINITY, second = -INFINITY;
  for (int e = 0; e < count; ++e) {
    const float key = keys[e];
    second = key > first ? first : fmaxf(second, key);
    first = fmaxf(first, key);
  }
  return count > 1 && !one ? first + second : first;
}

// Experts of groups that are not looked at come last. group_key [groups], keys [experts] in shared memory.
__device__ inline void close_groups(const SigmoidRouting& op, int lane, float* group_key, float* keys) {
  const int size = op.experts / op.groups;
  for (int g = lane; g < op.groups; g += kWarpLanes) {
    group_key[g] = two_largest(keys + g * size, size, op.softmax);
  }
  __syncwarp();  // all groups' keys are there
  for (int g = lane; g < op.groups; g += kWarpLanes) {
    int before = 0;
    for (int other = 0; other < op.groups; ++other) {
      before += group_key[other] > group_key[g] || (group_key[other] == group_key[g] && other < g) ? 1 : 0;
    }
    if (before < op.groups_chosen) continue;
    for (int e = g * size; e < (g + 1) * size; ++e) keys[e] = -INFINITY;
  }
  __syncwarp();  // nobody chooses before the groups are closed
}

// What makes weights of scores: {the largest, 1 / the sum of exponentials}, of all experts.
__device__ inline float2 softmax_of(const float* scores, int experts, int lane) {
  float largest = -INFINITY, sum = 0.0f;
  for (int e = lane; e < experts; e += kWarpLanes) largest = fmaxf(largest, scores[e]);
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  }
  for (int e = lane; e < experts; e += kWarpLanes) sum += expf(scores[e] - largest);
  return {largest, 1.0f / warp_sum(sum)};
}

// shared: keys [experts], group_key [groups].
__global__ void __launch_bounds__(kWarpLanes) sigmoid_routing_kernel(SigmoidRouting op) {
  extern __shared__ float keys[];
  const int lane = threadIdx.x;
  const int64_t t = blockIdx.x;
  const float* scores = op.scores + t * op.experts;
  for (int e = lane; e < op.experts; e += kWarpLanes) {
    const float weight = op.softmax ? scores[e] : sigmoid(scores[e]);
    const float key = weight + (op.choice_bias != nullptr ? op.choice_bias[e] : 0.0f);
    keys[e] = isnan(key) ? -INFINITY : key;
  }
  __syncwarp();  // all keys are there
  if (op.groups_chosen < op.groups) close_groups(op, lane, keys + op.experts, keys);
  const float2 over_all = op.softmax ? softmax_of(scores, op.experts, lane) : float2{0.0f, 0.0f};
  uint32_t last_key = 0xffffffffu;
  int32_t last_expert = -1;
  float sum = 0.0f;
  for (int slot = 0; slot < op.k; ++slot) {
    uint32_t key =
        0;  // the lane's first after the last chosen: larger keys first, the lower index among equals
    int32_t expert = INT_MAX;
    for (int e = lane; e < op.experts; e += kWarpLanes) {
      const uint32_t candidate = score_key(keys[e]);
      const bool after = candidate < last_key || (candidate == last_key && e > last_expert);
      if (after && candidate > key) key = candidate, expert = e;
    }
    last_key = __reduce_max_sync(kAllLanes, key);
    last_expert = __reduce_min_sync(kAllLanes, key == last_key ? expert : INT_MAX);
    const float score = scores[last_expert];
    const float weight = op.softmax ? expf(score - over_all.x) * over_all.y : sigmoid(score);
    sum += weight;
    if (lane == 0) {
      op.chosen[t * op.k + slot] = last_expert;
      op.weights[t * op.k + slot] = weight;
    }
  }
  if (lane != 0) return;
  for (int slot = 0; slot < op.k; ++slot) {  // what this lane wrote
    float& weight = op.weights[t * op.k + slot];
    weight = (op.renormalize ? weight / (sum + 1e-20f) : weight) * op.scale;
  }
}

__global__ void __launch_bounds__(kThreads)
    weigh_inputs_kernel(const float* x, int32_t k, int64_t cols, float* weights, float* out) {
  const int64_t pair = blockIdx.x;
  const float weight = weights[pair];
  for (int64_t c = threadIdx.x; c < cols; c += kThreads)
    out[pair * cols + c] = x[pair / k * cols + c] * weight;
  __syncthreads();  // all have read the weight
  if (threadIdx.x == 0) weights[pair] = 1.0f;
}

__global__ void __launch_bounds__(kThreads)
    add_mixed_kernel(const float* mix, float scale, const float* x, int64_t cols, float* residual) {
  const int64_t row = blockIdx.x;
  const float share = scale * sigmoid(mix[row]);
  for (int64_t c = threadIdx.x; c < cols; c += kThreads) {
    residual[row * cols + c] = fmaf(share, x[row * cols + c], residual[row * cols + c]);
  }
}

size_t shared_bytes(int32_t experts, int32_t groups) {
  return (static_cast<size_t>(experts) + static_cast<size_t>(groups)) * sizeof(float);
}

}  // namespace

bool supports_sigmoid_routing(int32_t experts, int32_t groups) {
  return shared_bytes(experts, groups) <= 48 * 1024;
}

void launch_sigmoid_routing(const SigmoidRouting& op, const Launch& at) {
  if (op.tokens == 0) return;
  sigmoid_routing_kernel<<<static_cast<unsigned>(op.tokens), kWarpLanes, shared_bytes(op.experts, op.groups),
                           at.stream>>>(op);
  check_launch("sigmoid_routing_kernel");
}

void launch_weigh_inputs(const float* x, int64_t pairs, int32_t k, int64_t cols, float* weights, float* out,
                         const Launch& at) {
  if (pairs == 0) return;
  weigh_inputs_kernel<<<static_cast<unsigned>(pairs), kThreads, 0, at.stream>>>(x, k, cols, weights, out);
  check_launch("weigh_inputs_kernel");
}

void launch_add_mixed(const float* mix, float scale, const float* x, int64_t rows, int64_t cols,
                      float* residual, const Launch& at) {
  if (rows == 0) return;
  add_mixed_kernel<<<static_cast<unsigned>(rows), kThreads, 0, at.stream>>>(mix, scale, x, cols, residual);
  check_launch("add_mixed_kernel");
}

}  // namespace millrace::cuda
