// What the attention kernels on the tensor cores share (packed_attention.cu has the numerics): how a row is
// cut into units and spans, numbers as two bf16, and the running softmax.
#pragma once

#include <cuda_bf16.h>

#include "backend/cuda/ops/cache.cuh"
#include "backend/cuda/ops/launch.cuh"
#include "backend/cuda/ops/reduce.cuh"
#include "backend/cuda/ptx/grid_dependency.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace millrace::cuda {

inline constexpr int kWarps = 8;
inline constexpr int kDim = 64;
inline constexpr int kGroup = 8;  // query heads per KV head, at most
inline constexpr int kUnit = 32;  // positions of a warp
inline constexpr int kMaxSpans = 32;
inline constexpr int kTilesOfUnit = kUnit / 8, kBlocksOfUnit = kUnit / kBlockTokens;
inline constexpr float kLog2e = 1.4426950408889634f;

// What a row sees, in units and spans.
struct Sight {
  int32_t first, last;  // positions
  int32_t first_unit, units;
  int32_t units_per_span, spans;
};

__host__ __device__ inline Sight sight_of(int32_t position, int32_t window) {
  Sight s;
  s.last = position;
  s.first = window > 0 && position >= window ? position - window + 1 : 0;
  s.first_unit = s.first / kUnit;
  s.units = s.last / kUnit - s.first_unit + 1;
  s.units_per_span = kWarps;
  while (s.units > s.units_per_span * kMaxSpans) s.units_per_span *= 2;
  s.spans = (s.units + s.units_per_span - 1) / s.units_per_span;
  return s;
}

__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
// Two floats as bf16, and what that leaves of them as bf16.
__device__ inline void split_bf16(float a, float b, uint32_t& upper, uint32_t& rest) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  upper = *reinterpret_cast<const uint32_t*>(&pair);
  rest = pack_bf16(a - __low2float(pair), b - __high2float(pair));
}

// Elements 8t..8t+7 and 32+8t..32+8t+7 of a head: what lane (g, t) holds of a query or key.
struct HeadPart {
  float x[16];
};
__device__ inline HeadPart load_part(const float* head, int t) {
  HeadPart p;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(head + (i / 2) * 32 + 8 * t) + i % 2);
    p.x[4 * i] = v.x, p.x[4 * i + 1] = v.y, p.x[4 * i + 2] = v.z, p.x[4 * i + 3] = v.w;
  }
  return p;
}
// A running softmax of one head: its largest score and the sum of weights; what it does to a sum of values.
struct RunningWeight {
  float top = -INFINITY, weight = 0.0f;
  struct Factors {
    float mine, its;
    __device__ float merge(float sum, float other) const { return fmaf(sum, mine, other * its); }
  };
  __device__ Factors add(float other_top, float other_weight) {
    const float new_top = fmaxf(top, other_top);
    const Factors by{top == new_top ? 1.0f : exp2f((top - new_top) * kLog2e),
                     other_top == new_top ? 1.0f : exp2f((other_top - new_top) * kLog2e)};
    weight = by.merge(weight, other_weight);
    top = new_top;
    return by;
  }
};

}  // namespace millrace::cuda
