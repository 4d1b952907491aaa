// Top-k routing of one token, by one warp: the k largest scores, ties and NaN to the lower index, and their
// softmax weights. Every kernel that needs the choice makes it with this function, so all make the same.
#pragma once

#include <climits>
#include <cstdint>

#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {

// A score as a number whose order is the scores': NaN counts as -infinity, zeros are equal. Never 0.
__device__ inline uint32_t score_key(float x) {
  const uint32_t bits = __float_as_uint(isnan(x) ? -INFINITY : x + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

inline constexpr int kRegisterScores = 4;  // per lane, in registers: models have up to 128 experts

// A token's scores, those beyond 32 kRegisterScores read again whenever they are needed.
struct LaneScores {
  const float* all = nullptr;
  int experts = 0;
  float kept[kRegisterScores];

  LaneScores() = default;  // for who fills `kept` with all there are
  __device__ LaneScores(const float* score, int count, int lane) : all(score), experts(count) {
#pragma unroll
    for (int i = 0; i < kRegisterScores; ++i) {
      kept[i] = i * kWarpLanes + lane < count ? __ldcg(score + i * kWarpLanes + lane) : -INFINITY;
    }
  }
  // f(expert, score) for the lane's experts.
  template <class F>
  __device__ void each(int lane, F&& f) const {
#pragma unroll
    for (int i = 0; i < kRegisterScores; ++i) {
      if (i * kWarpLanes + lane < experts) f(i * kWarpLanes + lane, kept[i]);
    }
    for (int e = kRegisterScores * kWarpLanes + lane; e < experts; e += kWarpLanes) f(e, __ldcg(all + e));
  }
};

// chosen, weights [k], written by lane 0 and visible to the warp. Each turn finds the first candidate after
// the one chosen last. All lanes must call; k <= experts.
__device__ inline void route_top_k(const LaneScores& scores, int k, bool softmax_over_all, int lane,
                                   int32_t* chosen, float* weights) {
  uint32_t last_key = 0xffffffffu;
  int32_t last_expert = -1;
  float top = 0.0f, chosen_sum = 0.0f;
  for (int slot = 0; slot < k; ++slot) {
    uint32_t key =
        0;  // the lane's first after the last chosen: larger keys first, the lower index among equals
    int32_t expert = INT_MAX;
    float value = 0.0f;  // the score itself, which may be NaN
    scores.each(lane, [&](int e, float x) {
      const uint32_t candidate = score_key(x);
      const bool after = candidate < last_key || (candidate == last_key && e > last_expert);
      if (after && candidate > key) key = candidate, expert = e, value = x;
    });
    last_key = __reduce_max_sync(kAllLanes, key);
    last_expert = __reduce_min_sync(kAllLanes, key == last_key ? expert : INT_MAX);
    value = __shfl_sync(kAllLanes, value, last_expert % kWarpLanes);  // its lane's own choice
    if (slot == 0) top = value;
    const float weight = expf(value - top);
    chosen_sum += weight;
    if (lane == 0) {
      chosen[slot] = last_expert;
      weights[slot] = weight;
    }
  }
  float sum = chosen_sum;
  if (softmax_over_all) {
    sum = 0.0f;
    scores.each(lane, [&](int, float x) { sum += expf(x - top); });
    sum = warp_sum(sum);
  }
  if (lane == 0) {
    for (int slot = 0; slot < k; ++slot) weights[slot] /= sum;
  }
  __syncwarp();
}

__device__ inline void route_top_k(const float* score, int experts, int k, bool softmax_over_all, int lane,
                                   int32_t* chosen, float* weights) {
  route_top_k(LaneScores(score, experts, lane), k, softmax_over_all, lane, chosen, weights);
}

}  // namespace millrace::cuda
