// The sum of exp(x - max) over what a thread reads, with the maximum not known before (online softmax).
#pragma once

#include "kernels/cuda/fused/rows.cuh"
#include "kernels/cuda/ptx/approx.cuh"

namespace millrace::cuda {

// exp of numbers that are not above zero: 2 ulp near 0, |x| * 2^-23 of the result further down.
__device__ inline float exp_of(float x) { return ptx::exp2_approx(x * 1.44269504f); }

struct OnlineSum {
  float max = -INFINITY, sum = 0.0f;

  // The first n of v.
  __device__ void add(const Values8& v, int n) {
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (i < n) most = fmaxf(most, v.v[i]);
    }
    if (most > max) {
      sum *= exp_of(max - most);  // of the first: 0 * 0
      max = most;
    }
    if (max == -INFINITY) {  // nothing yet that counts, unless it is NaN
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (i < n && isnan(v.v[i])) sum = NAN;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (i < n) sum += exp_of(v.v[i] - max);
    }
  }
  // Measured from the maximum of all threads.
  __device__ float sum_below(float all_max) const {
    return max == -INFINITY ? sum : sum * exp_of(max - all_max);
  }
};

}  // namespace millrace::cuda
