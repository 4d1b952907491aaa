// What the experts' streaming kernels share, whatever the weights' type: the choice, and adding up what the
// segments and the slots give.
#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/gemv/tile_ring.cuh"
#include "kernels/cuda/moe/activation.cuh"
#include "kernels/cuda/moe/top_k.cuh"
#include "kernels/cuda/tile/launch.cuh"

namespace millrace::cuda {

inline constexpr int kMaxChosen = 8;
inline constexpr int kDownTiles = 4;  // of a round; an H200's SMs have three each for 2,880 rows

struct ExpertParams {
  StreamExperts op;
  StreamShape shape;
};

struct Choice {
  int32_t expert[kMaxChosen];
  float weight[kMaxChosen];
};

__device__ inline void choose(const StreamExperts& op, int lane, Choice& choice) {
  choose_experts(op.scores + int64_t{blockIdx.y} * op.experts, op.experts, op.k, op.softmax_over_all, lane,
                 choice.expert, choice.weight);
}

__device__ inline const uint8_t* expert_tile(const PackedMatrix& w, int expert, int tile) {
  return w.tiles + (static_cast<int64_t>(expert) * w.tiles_per_expert + tile) * w.tile_bytes;
}

// What the segments give for one row of a tile: at partial + segment * stride. A segment that is empty may be
// left out: it adds zero to a sum that is never -0.
template <int kCount = kSegments>
__device__ inline float add_segments(const float* partial, int stride) {
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kCount; ++s) sum += partial[s * stride];
  return sum;
}

// Row `row` of a slot's activations, as the kernel after this one reads them.
__device__ inline void store_act(const StreamExperts& op, int slot, int64_t row, float value) {
  const int64_t at = (int64_t{blockIdx.y} * op.k + slot) * op.gate.rows + row;
  reinterpret_cast<__nv_bfloat16*>(op.act)[at] = __float2bfloat16_rn(value);
}

// A warp adds up one tile of 8 rows over its k slots, in order: partial [slot][tile][segment][8], `stride`
// floats from slot to slot. Four slots side by side.
struct DownOutput {
  float bias[kMaxChosen / 4] = {};
  float old = 0.0f;
};
__device__ inline DownOutput find_down(const StreamExperts& op, const Choice& choice, int tile, int lane) {
  DownOutput out;
  const int64_t row = int64_t{tile} * kTileRows + lane % kTileRows, rows = op.down.rows;
  if (row >= rows) return out;
  out.old = __ldcg(op.residual + blockIdx.y * rows + row);
#pragma unroll
  for (int i = 0; i < kMaxChosen / 4; ++i) {
    const int slot = 4 * i + lane / kTileRows;
    if (op.down_bias != nullptr && slot < op.k) {
      out.bias[i] = __ldg(op.down_bias + choice.expert[slot] * rows + row);
    }
  }
  return out;
}
template <int kCount = kSegments>
__device__ inline void finish_down(const StreamExperts& op, const Choice& choice, const DownOutput& out,
                                   const float* partial, int stride, int tile, int lane) {
  const int g = lane % kTileRows;
  const int64_t row = int64_t{tile} * kTileRows + g, rows = op.down.rows;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxChosen / 4; ++i) {
    const int slot = 4 * i + lane / kTileRows;
    const float value =
        slot < op.k ? add_segments<kCount>(partial + slot * stride + g, kTileRows) + out.bias[i] : 0.0f;
    for (int s = 4 * i; s < min(4 * i + 4, op.k); ++s) {
      sum = fmaf(choice.weight[s], __shfl_sync(kAllLanes, value, s % 4 * kTileRows + g), sum);
    }
  }
  if (lane < kTileRows && row < rows) op.residual[blockIdx.y * rows + row] = out.old + sum;
}

inline dim3 expert_grid(int64_t pieces, int32_t tokens, const Device& device) {
  const int64_t ctas = pieces < device.sm_count() ? pieces : device.sm_count();
  return {static_cast<unsigned>(ctas), static_cast<unsigned>(tokens)};
}

// MXFP4 (stream_mx4.cu); the rest is stream_experts.cu's.
StreamShape mx4_gate_up_shape(const StreamExperts& op, const Device& device);
StreamShape mx4_down_shape(const StreamExperts& op, const Device& device);
void launch_mx4_gate_up(const StreamExperts& op, const Launch& at);
void launch_mx4_down(const StreamExperts& op, const Launch& at);

}  // namespace millrace::cuda
