// Approximate functions of the special function unit: one instruction each, subnormal results are zeros.
#pragma once

namespace millrace::cuda::ptx {

// 2^x; 0 for -infinity, 1 for 0.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x.
__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace millrace::cuda::ptx
