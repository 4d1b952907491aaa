// The largest of many numbers, by one CTA: a digit of their bits after the other, from counts of each, then
// all of them in order of where they are. Of equals the first; nothing depends on the order of threads.
#pragma once

#include <cstdint>

#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {

inline constexpr int kSelectThreads = 1024, kSelectWarps = kSelectThreads / kWarpLanes;
static_assert(kSelectWarps == kWarpLanes);  // sum_before
inline constexpr int kSelectBins = 2 * kSelectThreads;

struct SelectShared {
  uint32_t bins[kSelectBins];
  uint32_t warp_sums[kSelectWarps], warp_equals[kSelectWarps];
  uint32_t digit, above;  // what was found: a digit, and how many are above it
};

// What the threads before this one count, added up. By all.
__device__ inline uint32_t sum_before(uint32_t count, uint32_t* warp_sums) {
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  uint32_t mine = count;
#pragma unroll
  for (int step = 1; step < kWarpLanes; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, mine, step);
    if (lane >= step) mine += other;
  }
  if (lane == kWarpLanes - 1) warp_sums[warp] = mine;
  __syncthreads();  // every warp's sum is there
  uint32_t of_warps = warp_sums[lane];
#pragma unroll
  for (int step = 1; step < kSelectWarps; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, of_warps, step);
    if (lane >= step) of_warps += other;
  }
  const uint32_t before_warp = __shfl_sync(kAllLanes, of_warps, (warp + kWarpLanes - 1) % kWarpLanes);
  return mine - count + (warp > 0 ? before_warp : 0u);
}

// The digit of `bits` bits at `shift` of the `wanted`-th largest of keys [first, last) whose bits above it
// are `prefix`; how many of them have a larger digit.
__device__ inline void find_digit(const uint32_t* keys, int32_t first, int32_t last, int shift, int bits,
                                  uint32_t prefix, uint32_t wanted, SelectShared& shared) {
  for (int i = threadIdx.x; i < kSelectBins; i += kSelectThreads) shared.bins[i] = 0;
  __syncthreads();  // the bins are empty
  for (int32_t i = first + static_cast<int32_t>(threadIdx.x); i < last; i += kSelectThreads) {
    const uint32_t key = keys[i];
    const bool counts = shift + bits == 32 || key >> (shift + bits) == prefix;
    if (counts) atomicAdd(shared.bins + (key >> shift & ((1u << bits) - 1)), 1u);
  }
  __syncthreads();  // everything is counted
  // From the largest digit down, two to a thread.
  const int at = kSelectBins - 1 - 2 * static_cast<int>(threadIdx.x);
  const uint32_t high = shared.bins[at], low = shared.bins[at - 1];
  const uint32_t before = sum_before(high + low, shared.warp_sums);
  if (before < wanted && wanted <= before + high + low) {
    const bool in_high = wanted <= before + high;
    shared.digit = static_cast<uint32_t>(in_high ? at : at - 1);
    shared.above = in_high ? before : before + high;
  }
  __syncthreads();  // digit and above are there, and nobody reads the bins any more
}

// emit(i, at) for the `count` largest of keys [first, last), i in the order of `at`. By all kSelectThreads;
// keys are there, and count is above 0 and no more than there are.
template <class Emit>
__device__ void select_largest(const uint32_t* keys, int32_t first, int32_t last, int32_t count,
                               SelectShared& shared, Emit&& emit) {
  uint32_t least = 0;                          // the smallest that is taken, as far as it is known
  auto wanted = static_cast<uint32_t>(count);  // of those that begin as it does
  constexpr int kShifts[3] = {21, 10, 0}, kBits[3] = {11, 11, 10};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    find_digit(keys, first, last, kShifts[i], kBits[i], least, wanted, shared);
    least = least << kBits[i] | shared.digit;
    wanted -= shared.above;
  }
  // A warp has a run of them: those above, and of equals the first `wanted`.
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int32_t run = (last - first + kSelectThreads - 1) / kSelectThreads * kWarpLanes;
  const int32_t begin = first + warp * run, end = min(begin + run, last);
  uint32_t num_above = 0, num_equal = 0;
  for (int32_t i = begin; i < end; i += kWarpLanes) {
    const bool there = i + lane < end;
    const uint32_t key = there ? keys[i + lane] : 0;
    num_above += __popc(__ballot_sync(kAllLanes, there && key > least));
    num_equal += __popc(__ballot_sync(kAllLanes, there && key == least));
  }
  if (lane == 0) shared.warp_sums[warp] = num_above, shared.warp_equals[warp] = num_equal;
  __syncthreads();  // every warp has counted
  uint32_t above_before = 0, equal_before = 0;
  for (int w = 0; w < warp; ++w) above_before += shared.warp_sums[w], equal_before += shared.warp_equals[w];
  const uint32_t lanes_before = (1u << lane) - 1;
  for (int32_t i = begin; i < end; i += kWarpLanes) {
    const bool there = i + lane < end;
    const uint32_t key = there ? keys[i + lane] : 0;
    const uint32_t larger = __ballot_sync(kAllLanes, there && key > least),
                   equal = __ballot_sync(kAllLanes, there && key == least);
    const uint32_t my_above = above_before + __popc(larger & lanes_before),
                   my_equal = equal_before + __popc(equal & lanes_before);
    if (there && (key > least || (key == least && my_equal < wanted)))
      emit(static_cast<int32_t>(my_above + min(my_equal, wanted)), i + lane);
    above_before += __popc(larger), equal_before += __popc(equal);
  }
}

}  // namespace millrace::cuda
