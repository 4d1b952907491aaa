// The best of many logits, in a total order: NaN before everything, larger values, lower indices.
#pragma once

#include <climits>

#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {

struct Best {
  float value = -INFINITY;
  int32_t index = INT_MAX;  // INT_MAX: none; -1: there was a NaN
};

__device__ inline Best better(Best a, Best b) {
  if (a.index < 0 || b.index < 0) return {0.0f, -1};
  return a.value > b.value || (a.value == b.value && a.index < b.index) ? a : b;
}

// Every lane gets it.
__device__ inline Best warp_best(Best best) {
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    best = better(best, {__shfl_xor_sync(kAllLanes, best.value, distance),
                         __shfl_xor_sync(kAllLanes, best.index, distance)});
  }
  return best;
}

}  // namespace millrace::cuda
