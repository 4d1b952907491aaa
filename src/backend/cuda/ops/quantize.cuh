// Activations as 8-bit integers: 32 neighbours share a scale, their largest magnitude over 127. The same
// functions serve every kernel, so that a row has the same codes wherever it is quantized. Also the row's
// RMSNorm, by 256 threads in a fixed order.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "backend/cuda/ops/packed.h"
#include "backend/cuda/ops/reduce.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/permute.cuh"

namespace millrace::cuda {

inline constexpr int kRowThreads = 256;  // that norm and quantize a row together
inline constexpr int kHeldQuads = 4;     // of each thread, in registers: rows of up to 4,096 are read once

// An integer n with |n| < 2^22 added to this and read as a float32 is 1.5 * 2^23 + n: the sum of a block
// leaves the tensor core as a float32 in all but name.
inline constexpr int32_t kFloatBits = 0x4b400000;
inline constexpr float kFloatOffset = 12582912.0f;

struct QuantizedQuad {
  uint32_t codes;  // four int8
  float scale;     // of the block
};

// Four codes plus 128, as two pairs of f16 integers: 1024 + u is the f16 0x6400 | u.
__device__ inline void codes_to_f16(uint32_t plus128, uint32_t& low, uint32_t& high) {
  constexpr uint32_t kExponents = 0x64646464u;
  const __half2 offset = __half2half2(__ushort_as_half(0x6480));
  const auto half = [&](uint32_t bits) {
    const __half2 v = __hsub2(*reinterpret_cast<const __half2*>(&bits), offset);
    return *reinterpret_cast<const uint32_t*>(&v);
  };
  low = half(ptx::permute(plus128, kExponents, 0x4140u));
  high = half(ptx::permute(plus128, kExponents, 0x4342u));
}

// Eight neighbouring lanes, aligned, hold a block of 32. All lanes of the warp must call. What is not finite
// makes the scale not finite, and with it every product.
__device__ inline QuantizedQuad quantize_quad(float4 x) {
  const auto magnitude = [](float v) { return __float_as_uint(v) & 0x7fffffffu; };
  uint32_t most = max(max(magnitude(x.x), magnitude(x.y)), max(magnitude(x.z), magnitude(x.w)));
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) {
    most = max(most, __shfl_xor_sync(kAllLanes, most, distance));
  }
  const float largest = __uint_as_float(most);
  const float inverse = most == 0 ? 0.0f : 127.0f * __frcp_rn(largest);
  const int c0 = __float2int_rn(x.x * inverse), c1 = __float2int_rn(x.y * inverse),
            c2 = __float2int_rn(x.z * inverse), c3 = __float2int_rn(x.w * inverse);
  QuantizedQuad quad;
  quad.codes = (c0 & 255) | (c1 & 255) << 8 | (c2 & 255) << 16 | static_cast<uint32_t>(c3 & 255) << 24;
  quad.scale = largest * (1.0f / 127.0f);
  return quad;
}

// The first quads of a thread's share of a row; zeros past its end.
struct HeldQuads {
  float4 v[kHeldQuads];
  // kFresh: written by an earlier kernel of the step. Else constant, and may be asked for before those are
  // done.
  template <bool kFresh>
  __device__ void load(const float4* row, int quads, int thread) {
#pragma unroll
    for (int j = 0; j < kHeldQuads; ++j) {
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

// 1 / rms of a row of `quads` float4 at x, whose first are held. kRowThreads threads, numbered by `thread`,
// must call; `partial`: 8 floats of shared memory that nobody else uses meanwhile. kName: the barrier's.
template <int kName>
__device__ inline float row_inverse_rms(const float4* x, const HeldQuads& held, int quads, float eps,
                                        int thread, float* partial) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kHeldQuads; ++j) sum = add_squares(held.v[j], sum);
  for (int i = thread + kHeldQuads * kRowThreads; i < quads; i += kRowThreads)
    sum = add_squares(__ldcg(x + i), sum);
  sum = warp_sum(sum);
  ptx::named_barrier<kName, kRowThreads>();  // the last row's readers are done with `partial`
  if (thread % kWarpLanes == 0) partial[thread / kWarpLanes] = sum;
  ptx::named_barrier<kName, kRowThreads>();  // all eight are there
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kRowThreads / kWarpLanes; ++i) total += partial[i];
  return 1.0f / sqrtf(total / static_cast<float>(4 * quads) + eps);
}

__device__ inline float4 norm_quad(float4 x, float scale, float4 weight) {
  return {x.x * scale * weight.x, x.y * scale * weight.y, x.z * scale * weight.z, x.w * scale * weight.w};
}

// Quantized rows as the B operand of the streaming kernels reads them:
//   codes [row][pair][even, odd][t] 8 bytes: elements 4t.. and 16+4t.. of the block
//   scales [row][pair][even, odd]
struct QuantizedRows {
  uint8_t* codes;
  float* scales;
};
inline constexpr int kRowPairBytes = 64 + 8;

// `rows` rows of `pairs` pairs, one plane after the other from `base` on (16-byte aligned).
__host__ __device__ inline QuantizedRows quantized_rows(uint8_t* base, int64_t rows, int64_t pairs) {
  return {base, reinterpret_cast<float*>(base + rows * pairs * 64)};
}

// Stores quad i (elements 4i..4i+3) of a row whose pairs begin at `first_pair` of the planes.
__device__ inline void store_quad(const QuantizedRows& to, int64_t first_pair, int i,
                                  const QuantizedQuad& q) {
  const int64_t block = first_pair * 2 + i / 8;
  const int in_block = i % 8;
  *reinterpret_cast<uint32_t*>(to.codes + block * 32 + in_block % 4 * 8 + in_block / 4 * 4) = q.codes;
  if (in_block == 0) to.scales[block] = q.scale;
}

// Norms (when `weight`) and quantizes one row of `cols` floats, a multiple of 32; the columns of a missing
// last block are zeros. store(i, v, q) for each quad i with its values and codes. held_weight: the weight's
// first quads. kRowThreads threads must call.
template <int kName, class Store>
__device__ inline void quantize_row(const float* x, const float* weight, const HeldQuads& held_weight,
                                    float eps, int cols, int thread, float* partial, Store&& store) {
  const auto* from = reinterpret_cast<const float4*>(x);
  const int quads = cols / 4, padded = packed_pairs(cols) * (kPairColumns / 4);
  HeldQuads held;
  held.load<true>(from, quads, thread);
  const float scale =
      weight != nullptr ? row_inverse_rms<kName>(from, held, quads, eps, thread, partial) : 1.0f;
#pragma unroll
  for (int j = 0; j < kHeldQuads; ++j) {
    const int i = j * kRowThreads + thread;
    if (j * kRowThreads >= padded) continue;  // the whole CTA alike: lanes exchange
    const float4 v = weight != nullptr ? norm_quad(held.v[j], scale, held_weight.v[j]) : held.v[j];
    const QuantizedQuad q = quantize_quad(v);
    if (i < padded) store(i, v, q);
  }
  for (int first = kHeldQuads * kRowThreads; first < padded; first += kRowThreads) {
    const int i = first + thread;
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (i < quads) v = __ldcg(from + i);
    if (i < quads && weight != nullptr) {
      v = norm_quad(v, scale, __ldg(reinterpret_cast<const float4*>(weight) + i));
    }
    const QuantizedQuad q = quantize_quad(v);
    if (i < padded) store(i, v, q);
  }
}

}  // namespace millrace::cuda
