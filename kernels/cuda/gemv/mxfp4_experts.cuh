// What the streaming kernels with MXFP4 experts share: a piece of work is two tiles of 8 rows that make the
// 16 rows of a tensor core product, a warp multiplies one segment of their columns (mx4.cuh).
#pragma once

#include "kernels/cuda/gemv/experts.cuh"
#include "kernels/cuda/quant/mxfp4.cuh"

namespace millrace::cuda {

inline constexpr int kPieceRows = 2 * kTileRows;

// sum += rows of two tiles . x over one pair of blocks. x: this lane's row of activations.
__device__ inline void multiply_blocks(const uint8_t* first_tile, const uint8_t* second_tile,
                                       const uint8_t* x, int lane, float (&sum)[4]) {
  const uint8_t* tiles[2] = {first_tile, second_tile};
  uint2 words[2];
  uint32_t scales[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    words[i] = reinterpret_cast<const uint2*>(tiles[i])[lane];
    const uint8_t* scale = tiles[i] + kMx4ScalesAt + lane / 4 * 2;
    scales[i][0] = scale[0], scales[i][1] = scale[1];  // two loads: shared memory has the time, integers not
  }
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const uint4 b = *reinterpret_cast<const uint4*>(x + odd * 64 + lane % 4 * 16);
    const uint4 low = mx4_weights(odd ? words[0].y : words[0].x, mx4_scale(scales[0][odd]));
    const uint4 high = mx4_weights(odd ? words[1].y : words[1].x, mx4_scale(scales[1][odd]));
    const uint32_t a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
    ptx::mma_bf16(sum, a0, b.x, b.y);
    ptx::mma_bf16(sum, a1, b.z, b.w);
  }
}

// The same over the warp's segment; without a branch where it is whole, so that loads, decoding and products
// of different blocks overlap.
template <int kPairs>
__device__ inline void multiply_segment(const uint8_t* first_tile, const uint8_t* second_tile,
                                        const uint8_t* x, int first, int count, int lane, float (&sum)[4]) {
  first_tile += first * kMx4PairBytes, second_tile += first * kMx4PairBytes, x += first * (kPairColumns * 2);
  const auto pair = [&](int j) {
    multiply_blocks(first_tile + j * kMx4PairBytes, second_tile + j * kMx4PairBytes,
                    x + j * (kPairColumns * 2), lane, sum);
  };
  if (count == kPairs) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) pair(j);
  } else {
    for (int j = 0; j < count; ++j) pair(j);
  }
}

struct Segment {
  int first, count;
  __device__ Segment(int pairs, int index) {
    const int per = pairs_per_segment(pairs);
    first = min(index * per, pairs);
    count = min(per, pairs - first);
  }
};

// One of a piece's sums, [gate, up][8], asked for before its tiles are multiplied, so that the bias is there.
struct HalfOutput {
  int slot = -1;
  int64_t row = 0;
  float bias = 0.0f;
};
__device__ inline HalfOutput find_half(const StreamExperts& op, const Choice& choice, int first, int count) {
  HalfOutput out;
  const int n = static_cast<int>(threadIdx.x) / kPieceRows, value = threadIdx.x % kPieceRows;
  if (n >= count) return out;
  const int slot = (first + n) / op.gate.tiles_per_expert, tile = (first + n) % op.gate.tiles_per_expert;
  out.row = int64_t{tile} * kTileRows + value % kTileRows;
  if (out.row >= op.gate.rows) return out;
  out.slot = slot;
  const float* bias = value < kTileRows ? op.gate_bias : op.up_bias;
  if (bias != nullptr) out.bias = __ldg(bias + choice.expert[slot] * op.gate.rows + out.row);
  return out;
}

}  // namespace millrace::cuda
