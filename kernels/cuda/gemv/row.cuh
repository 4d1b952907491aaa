// Rows of activations on their way into a product: RMSNorm where there is one, then rounding to bf16. The
// same function serves the GEMV kernels and the one before a GEMM, with the same number of
// threads, so that a row has the same bits wherever it is normed.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/quant/mxfp4.cuh"
#include "kernels/cuda/quant/packed_tiles.h"
#include "kernels/cuda/tile/reduce.cuh"
#include "millrace/kernels/tile/ptx/barrier.cuh"

namespace millrace::cuda {

inline constexpr int kRoundThreads = 512;  // that norm and round a row together
inline constexpr int kRoundWarps = kRoundThreads / kWarpLanes;
inline constexpr int kRoundKept = 2;  // quads of each thread, in registers: rows of up to 4,096 are read once

// The first quads of a thread's part of a row; zeros past its end.
struct RowQuads {
  float4 v[kRoundKept];
  // kFresh: written by an earlier kernel of the step. Else constant, and may be loaded before those are
  // done.
  template <bool kFresh>
  __device__ void load(const float* row, int quads) {
#pragma unroll
    for (int j = 0; j < kRoundKept; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * kRoundThreads;
      v[j] = float4{0.0f, 0.0f, 0.0f, 0.0f};
      if (row == nullptr || i >= quads) continue;
      const auto* from = reinterpret_cast<const float4*>(row) + i;
      v[j] = kFresh ? __ldcg(from) : __ldg(from);
    }
  }
};

__device__ inline float squares(float4 v, float sum) {
  sum = fmaf(v.x, v.x, sum);
  sum = fmaf(v.y, v.y, sum);
  sum = fmaf(v.z, v.z, sum);
  return fmaf(v.w, v.w, sum);
}

__device__ inline uint2 rounded_quad(float4 x, float scale, float4 weight) {
  return {bf16_pair(x.x * scale * weight.x, x.y * scale * weight.y),
          bf16_pair(x.z * scale * weight.z, x.w * scale * weight.w)};
}
__device__ inline uint2 rounded_quad(float4 x) { return {bf16_pair(x.x, x.y), bf16_pair(x.z, x.w)}; }

// Norms (when `weight`) and rounds `count` rows of `cols` floats, a multiple of 32; the columns of a missing
// last block are zeros. row(t): where row t lies; store(t, i, words) for each of its quads i. kept_weight:
// the weight's first quads; partial: 16 floats of shared memory for each row. kRoundThreads threads must
// call.
template <int kMaxRows, class Row, class Store>
__device__ inline void round_rows(int count, Row&& row, const float* weight, const RowQuads& kept_weight,
                                  float eps, int cols, float* partial, Store&& store) {
  const int quads = cols / 4, padded = packed_k_steps(cols) * (kKStepColumns / 4);
  const int rest =
      static_cast<int>(threadIdx.x) + kRoundKept * kRoundThreads;  // the first that is not in registers
  RowQuads kept[kMaxRows];
#pragma unroll
  for (int t = 0; t < kMaxRows; ++t) kept[t].template load<true>(t < count ? row(t) : nullptr, quads);
  if (weight != nullptr) {
#pragma unroll
    for (int t = 0; t < kMaxRows; ++t) {
      if (t >= count) break;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kRoundKept; ++j) sum = squares(kept[t].v[j], sum);
      for (int i = rest; i < quads; i += kRoundThreads)
        sum = squares(__ldcg(reinterpret_cast<const float4*>(row(t)) + i), sum);
      sum = warp_sum(sum);
      if (threadIdx.x % kWarpLanes == 0) partial[t * kRoundWarps + threadIdx.x / kWarpLanes] = sum;
    }
    __syncthreads();  // all are there
  }
#pragma unroll
  for (int t = 0; t < kMaxRows; ++t) {
    if (t >= count) break;
    float scale = 1.0f;
    if (weight != nullptr) {
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kRoundWarps; ++i) total += partial[t * kRoundWarps + i];
      scale = 1.0f / sqrtf(total / static_cast<float>(cols) + eps);
    }
#pragma unroll
    for (int j = 0; j < kRoundKept; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * kRoundThreads;
      const float4 x = kept[t].v[j];
      if (i < padded)
        store(t, i, weight != nullptr ? rounded_quad(x, scale, kept_weight.v[j]) : rounded_quad(x));
    }
    for (int i = rest; i < padded; i += kRoundThreads) {
      uint2 words = {0u, 0u};
      if (i < quads) {
        const float4 x = __ldcg(reinterpret_cast<const float4*>(row(t)) + i);
        words = weight != nullptr ? rounded_quad(x, scale, __ldg(reinterpret_cast<const float4*>(weight) + i))
                                  : rounded_quad(x);
      }
      store(t, i, words);
    }
  }
}

}  // namespace millrace::cuda
