// The router's RMSNorm of a row, by 256 threads in a fixed order.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/tile/reduce.cuh"
#include "millrace/kernels/tile/ptx/barrier.cuh"

namespace millrace::cuda {

inline constexpr int kRowThreads = 256;   // that norm a row together
inline constexpr int kRegisterQuads = 4;  // of each thread, in registers: rows of up to 4,096 are read once

// The first quads of a thread's part of a row; zeros past its end.
struct RegisterQuads {
  float4 v[kRegisterQuads];
  // kFresh: written by an earlier kernel of the step. Else constant, and may be loaded before those are
  // done.
  template <bool kFresh>
  __device__ void load(const float4* row, int quads, int thread) {
#pragma unroll
    for (int j = 0; j < kRegisterQuads; ++j) {
      const int i = thread + j * kRowThreads;
      v[j] = float4{0.0f, 0.0f, 0.0f, 0.0f};
      if (row != nullptr && i < quads) v[j] = kFresh ? __ldcg(row + i) : __ldg(row + i);
    }
  }
};

__device__ inline float add_squares(float4 v, float sum) {
  sum = fmaf(v.x, v.x, sum);
  sum = fmaf(v.y, v.y, sum);
  sum = fmaf(v.z, v.z, sum);
  return fmaf(v.w, v.w, sum);
}

// 1 / rms of a row of `quads` float4 at x, whose first are kept. kRowThreads threads, numbered by `thread`,
// must call; `partial`: 8 floats of shared memory that nobody else uses meanwhile. kName: the barrier's.
template <int kName>
__device__ inline float row_inverse_rms(const float4* x, const RegisterQuads& kept, int quads, float eps,
                                        int thread, float* partial) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kRegisterQuads; ++j) sum = add_squares(kept.v[j], sum);
  for (int i = thread + kRegisterQuads * kRowThreads; i < quads; i += kRowThreads)
    sum = add_squares(__ldcg(x + i), sum);
  sum = warp_sum(sum);
  ptx::named_barrier<kName, kRowThreads>();  // nobody writes `partial` before the last row's is read
  if (thread % kWarpLanes == 0) partial[thread / kWarpLanes] = sum;
  ptx::named_barrier<kName, kRowThreads>();  // all wait for the eight sums
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kRowThreads / kWarpLanes; ++i) total += partial[i];
  return 1.0f / sqrtf(total / static_cast<float>(4 * quads) + eps);
}

__device__ inline float4 norm_quad(float4 x, float scale, float4 weight) {
  return {x.x * scale * weight.x, x.y * scale * weight.y, x.z * scale * weight.z, x.w * scale * weight.w};
}

// Norms one row of `cols` floats, a multiple of 4: store(i, v) for each quad i. kept_weight: the weight's
// first quads. kRowThreads threads must call.
template <int kName, class Store>
__device__ inline void norm_row(const float* x, const float* weight, const RegisterQuads& kept_weight,
                                float eps, int cols, int thread, float* partial, Store&& store) {
  const auto* from = reinterpret_cast<const float4*>(x);
  const int quads = cols / 4;
  RegisterQuads kept;
  kept.load<true>(from, quads, thread);
  const float scale = row_inverse_rms<kName>(from, kept, quads, eps, thread, partial);
#pragma unroll
  for (int j = 0; j < kRegisterQuads; ++j) {
    const int i = j * kRowThreads + thread;
    if (i < quads) store(i, norm_quad(kept.v[j], scale, kept_weight.v[j]));
  }
  for (int i = kRegisterQuads * kRowThreads + thread; i < quads; i += kRowThreads)
    store(i, norm_quad(__ldcg(from + i), scale, __ldg(reinterpret_cast<const float4*>(weight) + i)));
}

}  // namespace millrace::cuda
