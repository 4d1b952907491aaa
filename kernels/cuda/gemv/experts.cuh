// What the GEMV kernels of experts share: how a warp multiplies its segment of two tiles, per format;
// routing; and adding up what the segments and the slots give.
//
// A work item is two tiles of 8 rows that make the 16 rows of a tensor core product: gate and up of the same
// rows, or the same rows of two slots' down.
#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/gemv/tile_ring.cuh"
#include "kernels/cuda/moe/activation.cuh"
#include "kernels/cuda/moe/top_k.cuh"
#include "kernels/cuda/quant/mxfp4.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "kernels/cuda/tile/weight_format.cuh"

namespace millrace::cuda {

inline constexpr int kMaxTopK = 8;
inline constexpr int kItemRows = 2 * kTileRows;
inline constexpr int kDownTiles = 4;  // of a round; an H200's SMs have three each for 2,880 rows

// ---------------------------------------------------------------- two tiles times a row

// sum += rows of two tiles . x over one K step, a pair of blocks. x: this lane's row of activations.
__device__ inline void multiply_mxfp4_blocks(const uint8_t* first_tile, const uint8_t* second_tile,
                                             const uint8_t* x, int lane, float (&sum)[4]) {
  const uint8_t* tiles[2] = {first_tile, second_tile};
  uint2 words[2];
  uint32_t scales[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    words[i] = reinterpret_cast<const uint2*>(tiles[i])[lane];
    const uint8_t* scale = tiles[i] + kMxfp4ScalesAt + lane / 4 * 2;
    scales[i][0] = scale[0], scales[i][1] = scale[1];  // two loads: shared memory has the time, integers not
  }
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const uint4 b = *reinterpret_cast<const uint4*>(x + odd * 64 + lane % 4 * 16);
    const uint4 low = mxfp4_weights(odd ? words[0].y : words[0].x, mxfp4_scale(scales[0][odd]));
    const uint4 high = mxfp4_weights(odd ? words[1].y : words[1].x, mxfp4_scale(scales[1][odd]));
    const uint32_t a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
    ptx::mma_bf16(sum, a0, b.x, b.y);
    ptx::mma_bf16(sum, a1, b.z, b.w);
  }
}

// How experts of a format are multiplied.
//   kMinCtas: CTAs of an SM that registers must leave room for.
//   kGateUpRound: work items of gate and up whose partial sums are kept before they are added up.
//   kMaxKSteps: K steps (pairs of blocks) of a segment that have a kernel without a branch each; 0: one for
//   all.
//   multiply<kKSteps>: sum += the segment's part of two tiles . x; both begin with the first column.
template <PackedFormat kFormat>
struct ExpertFormat {
  // Small codes leave registers for two: the next kernel's first stages are under way while one ends.
  static constexpr int kMinCtas = kFormat >= PackedFormat::kQ4 ? 2 : 1, kGateUpRound = 8, kMaxKSteps = 0;
  static constexpr uint32_t kGateUpRingBytes = kRingBytes;
  template <int kKSteps>
  __device__ static void multiply(const uint8_t* first_tile, const uint8_t* second_tile, const uint8_t* x,
                                  const WarpSegment& segment, int lane, float (&sum)[4]) {
    const int at = segment.first * TileFormat<kFormat>::kKStepBytes;
    multiply_segment<kFormat, kKSteps, true>(
        first_tile + at, second_tile + at, x + segment.first * (kKStepColumns * 2), segment.count, lane, sum);
  }
};
// Some 38 instructions of a warp per 16 x 32 weights. Without a branch where a segment is whole, so that
// loads, dequantizing and products of different blocks overlap.
template <>
struct ExpertFormat<PackedFormat::kMxfp4> {
  static constexpr int kMinCtas = 2, kGateUpRound = 16, kMaxKSteps = 4;
  static constexpr uint32_t kGateUpRingBytes = kWholeBytes;
  template <int kKSteps>
  __device__ static void multiply(const uint8_t* first_tile, const uint8_t* second_tile, const uint8_t* x,
                                  const WarpSegment& segment, int lane, float (&sum)[4]) {
    first_tile += segment.first * kMxfp4KStepBytes, second_tile += segment.first * kMxfp4KStepBytes;
    x += segment.first * (kKStepColumns * 2);
    const auto step = [&](int j) {
      multiply_mxfp4_blocks(first_tile + j * kMxfp4KStepBytes, second_tile + j * kMxfp4KStepBytes,
                            x + j * (kKStepColumns * 2), lane, sum);
    };
    if (segment.count == kKSteps) {
#pragma unroll
      for (int j = 0; j < kKSteps; ++j) step(j);
    } else {
      for (int j = 0; j < segment.count; ++j) step(j);
    }
  }
};

// ---------------------------------------------------------------- routing

struct TopK {
  int32_t expert[kMaxTopK];
  float weight[kMaxTopK];
};
__device__ inline void route(const GemvExperts& op, int lane, TopK& chosen) {
  route_top_k(op.scores + int64_t{blockIdx.y} * op.experts, op.experts, op.k, op.softmax_over_all, lane,
              chosen.expert, chosen.weight);
}

__device__ inline const uint8_t* expert_tile(const PackedMatrix& w, int expert, int tile) {
  return w.tiles + (static_cast<int64_t>(expert) * w.tiles_per_expert + tile) * w.tile_bytes;
}
__host__ __device__ inline uint32_t row_bytes(const PackedMatrix& w) {  // of activations as bf16
  return static_cast<uint32_t>(w.k_steps) * kKStepColumns * 2;
}

// ---------------------------------------------------------------- epilogues

// What the segments give for one row of a tile: at partial + segment * stride. A segment that is empty may be
// left out: it adds zero to a sum that is never -0.
template <int kCount = kSplitK>
__device__ inline float add_segments(const float* partial, int stride) {
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kCount; ++s) sum += partial[s * stride];
  return sum;
}

// Row `row` of a slot's activations, as the kernel after this one reads them.
__device__ inline void store_act(const GemvExperts& op, int slot, int64_t row, float value) {
  const int64_t at = (int64_t{blockIdx.y} * op.k + slot) * op.gate.rows + row;
  reinterpret_cast<__nv_bfloat16*>(op.act)[at] = __float2bfloat16_rn(value);
}

// A warp adds up one tile of 8 rows over its k slots, in order: partial [slot][tile][segment][8], `stride`
// floats from slot to slot. Four slots side by side. Bias and residual are loaded before the round's tiles
// are multiplied.
struct DownOutput {
  float bias[kMaxTopK / 4] = {};
  float old = 0.0f;
};
__device__ inline DownOutput load_down_output(const GemvExperts& op, const TopK& chosen, int tile, int lane) {
  DownOutput out;
  const int64_t row = int64_t{tile} * kTileRows + lane % kTileRows, rows = op.down.rows;
  if (row >= rows) return out;
  out.old = __ldcg(op.residual + blockIdx.y * rows + row);
#pragma unroll
  for (int i = 0; i < kMaxTopK / 4; ++i) {
    const int slot = 4 * i + lane / kTileRows;
    if (op.down_bias != nullptr && slot < op.k) {
      out.bias[i] = __ldg(op.down_bias + chosen.expert[slot] * rows + row);
    }
  }
  return out;
}
template <int kCount = kSplitK>
__device__ inline void store_down_output(const GemvExperts& op, const TopK& chosen, const DownOutput& out,
                                         const float* partial, int stride, int tile, int lane) {
  const int g = lane % kTileRows;
  const int64_t row = int64_t{tile} * kTileRows + g, rows = op.down.rows;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxTopK / 4; ++i) {
    const int slot = 4 * i + lane / kTileRows;
    const float value =
        slot < op.k ? add_segments<kCount>(partial + slot * stride + g, kTileRows) + out.bias[i] : 0.0f;
    for (int s = 4 * i; s < min(4 * i + 4, op.k); ++s) {
      sum = fmaf(chosen.weight[s], __shfl_sync(kAllLanes, value, s % 4 * kTileRows + g), sum);
    }
  }
  if (lane < kTileRows && row < rows) op.residual[blockIdx.y * rows + row] = out.old + sum;
}

}  // namespace millrace::cuda
