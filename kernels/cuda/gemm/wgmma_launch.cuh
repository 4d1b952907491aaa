// What a warpgroup product multiplies and where its sums go: plain matrices, and the experts of sorted rows.
#pragma once

#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemv/tile_ring.cuh"
#include "kernels/cuda/moe/activation.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "kernels/cuda/tile/weight_format.cuh"

namespace millrace::cuda {

inline constexpr int kGroupThreads = 128;  // a warpgroup
inline constexpr int kGroupWarps = kGroupThreads / kWarpLanes;
inline constexpr int kConsumers = 2;  // warpgroups

// One CTA's work: some tiles of weights, from first_n on, on up to two tiles of rows.
struct WgmmaItem {
  int32_t matrix;  // part or expert
  int32_t first_tile, first_n;
  int32_t rows;  // of activations
};

struct WgmmaLinear {
  struct Part {
    const uint8_t* tiles;
    const float* bias;
    float* out;
    int32_t rows, num_tiles;
  };
  Part parts[3];
  int32_t num_parts, pairs;
  uint32_t tile_bytes;
  WideRows x;
  int64_t rows;
  bool add;
  int32_t item_rows;  // of activations: 64 or 128

  template <int kN>
  __host__ __device__ int n_items(int part) const {
    return (parts[part].num_tiles + kN / 8 - 1) / (kN / 8);
  }
  __host__ __device__ int m_items() const { return static_cast<int>((rows + item_rows - 1) / item_rows); }
  template <int kN>
  __host__ __device__ int items() const {
    int n = 0;
    for (int i = 0; i < num_parts; ++i) n += n_items<kN>(i);
    return n * m_items();
  }
  // CTAs that follow one another share weights.
  template <int kN>
  __device__ WgmmaItem item(int i) const {
    const int m = i % m_items();
    int n = i / m_items(), part = 0;
    while (part + 1 < num_parts && n >= n_items<kN>(part)) n -= n_items<kN>(part++);
    return {part, m * (item_rows / kWgmmaRows), n * (kN / 8),
            static_cast<int32_t>(min(int64_t{item_rows}, rows - int64_t{item_rows} * m))};
  }
};
inline WgmmaLinear wgmma_linear(const WideLinear& op) {
  WgmmaLinear p{};
  p.num_parts = op.num_parts;
  for (int i = 0; i < op.num_parts; ++i) {
    const WideLinear::Part& part = op.parts[i];
    p.parts[i] = {part.w.tiles, part.bias, part.out, static_cast<int32_t>(part.w.rows),
                  part.w.tiles_per_expert};
  }
  p.pairs = op.parts[0].w.pairs;
  p.tile_bytes = op.parts[0].w.tile_bytes;
  p.x = op.x;
  p.rows = op.rows;
  p.add = op.add;
  return p;
}

// Items by clusters (wide_fitted.cuh), of weights that are bf16 as they lie or opened.
void launch_fitted_linear(const WideLinear& op, WideItems items, const Launch& at);

template <bool kGateUp>
struct WgmmaExperts {
  WideExperts op;
  WideRows x;
  int32_t pairs;

  // Gate and up alternate in tiles, so that a lane holds both.
  template <int kN>
  static constexpr int kTiles = kGateUp ? kN / 16 : kN / 8;
  template <int kN>
  __device__ int n_items() const {
    return (op.gate.tiles_per_expert + kTiles<kN> - 1) / kTiles<kN>;
  }
  template <int kN>
  __device__ int items() const {
    return *op.groups.num_chunks * n_items<kN>();
  }
  // CTAs that follow one another share activations; the chunks of an expert, its weights.
  template <int kN>
  __device__ WgmmaItem item(int i) const {
    const int32_t* chunk = op.groups.chunks + 4 * (i / n_items<kN>());
    return {chunk[0], chunk[1], i % n_items<kN>() * kTiles<kN>, chunk[3]};
  }
};

}  // namespace millrace::cuda
