// Sums over a warp and over a CTA in a fixed order: the same inputs in the same lanes give the same bits.
#pragma once

namespace millrace::tile {

inline constexpr int kWarpLanes = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// Every lane gets the sum. All 32 lanes must call.
__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// Over the four lanes of a quad, which share a row of a product's sums; all lanes get it.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// Every thread of a CTA of kThreads gets the sum. All must call; at most once between two other barriers, for
// `partial` is written before the barrier and read after it.
template <int kThreads>
__device__ inline float block_sum(float value, float* partial /* shared, [kThreads / 32] */) {
  value = warp_sum(value);
  if constexpr (kThreads == kWarpLanes) return value;
  if (threadIdx.x % kWarpLanes == 0) partial[threadIdx.x / kWarpLanes] = value;
  __syncthreads();  // all warps' partial sums are there
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / kWarpLanes; ++i) sum += partial[i];
  return sum;
}

}  // namespace millrace::tile
