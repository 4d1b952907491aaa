// The sum of exp(x - max) over what a thread reads, with the maximum not known before (online softmax).
#pragma once

#include "kernels/cuda/fused/rows.cuh"
#include "millrace/kernels/tile/ptx/approx.cuh"

namespace millrace::cuda {

// exp of numbers that are not above zero: 2 ulp near 0, |x| * 2^-23 of the result further down.
inline constexpr float kLog2E = 1.44269504f;
__device__ inline float exp_of(float x) { return ptx::exp2_approx(x * kLog2E); }

struct OnlineSum {
  float max = -INFINITY, sum = 0.0f;

  // The first n of v (Form::kBf16: n is eight).
  template <Form kForm = Form::kAny>
  __device__ void add(const Values8& v, int n) {
    constexpr bool kAll = kForm == Form::kBf16;
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (kAll || i < n) most = fmaxf(most, v.v[i]);
    }
    if (most > max) {
      sum *= exp_of(max - most);  // of the first: 0 * 0
      max = most;
    }
    // Nothing yet that counts: 2^-infinity is 0, NaN alone is not lost.
    const float shift = max == -INFINITY ? 0.0f : -max * kLog2E;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (kAll || i < n) sum += ptx::exp2_approx(fmaf(v.v[i], kLog2E, shift));
    }
  }
  // What another has found behind what this one has.
  __device__ void join(const OnlineSum& next) {
    const float most = fmaxf(max, next.max);
    sum = sum_below(most) + next.sum_below(most);
    max = most;
  }
  // Measured from the maximum of all threads.
  __device__ float sum_below(float all_max) const {
    return max == -INFINITY ? sum : sum * exp_of(max - all_max);
  }
};

}  // namespace millrace::cuda
