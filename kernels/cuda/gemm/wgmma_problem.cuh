// The work items of a GEMM on warpgroup instructions: of plain matrices, and of experts with sorted rows.
#pragma once

#include "kernels/cuda/gemm/gemm.h"
#include "millrace/kernels/tile/ptx/wgmma.cuh"

namespace millrace::cuda {

inline constexpr int kConsumers = 2;  // warpgroups

// A work item: some tiles of weights, from first_n on, times up to two tiles of rows of activations.
struct GemmItem {
  int32_t matrix;  // part or expert
  int32_t first_tile, first_n;
  int32_t rows;  // of activations
};

struct WgmmaGemm {
  struct Part {
    const uint8_t* tiles;
    const float* bias;
    float* out;
    int32_t rows, num_tiles;
  };
  Part parts[3];
  int32_t num_parts, k_steps;
  uint32_t tile_bytes;
  Bf16Rows x;
  int64_t rows;
  bool add;
  int32_t tile_tokens;  // of activations: 64 or 128

  template <int kN>
  __host__ __device__ int n_tiles(int part) const {
    return (parts[part].num_tiles + kN / 8 - 1) / (kN / 8);
  }
  __host__ __device__ int m_tiles() const { return static_cast<int>((rows + tile_tokens - 1) / tile_tokens); }
  template <int kN>
  __host__ __device__ int items() const {
    int n = 0;
    for (int i = 0; i < num_parts; ++i) n += n_tiles<kN>(i);
    return n * m_tiles();
  }
  // CTAs that follow one another share weights.
  template <int kN>
  __device__ GemmItem item(int i) const {
    const int m = i % m_tiles();
    int n = i / m_tiles(), part = 0;
    while (part + 1 < num_parts && n >= n_tiles<kN>(part)) n -= n_tiles<kN>(part++);
    return {part, m * (tile_tokens / kWgmmaRows), n * (kN / 8),
            static_cast<int32_t>(min(int64_t{tile_tokens}, rows - int64_t{tile_tokens} * m))};
  }
};
inline WgmmaGemm wgmma_gemm(const Gemm& op) {
  WgmmaGemm p{};
  p.num_parts = op.num_parts;
  for (int i = 0; i < op.num_parts; ++i) {
    const Gemm::Part& part = op.parts[i];
    p.parts[i] = {part.w.tiles, part.bias, part.out, static_cast<int32_t>(part.w.rows),
                  part.w.tiles_per_expert};
  }
  p.k_steps = op.parts[0].w.k_steps;
  p.tile_bytes = op.parts[0].w.tile_bytes;
  p.x = op.x;
  p.rows = op.rows;
  p.add = op.add;
  return p;
}

template <bool kGateUp>
struct WgmmaGroupedGemm {
  GroupedGemm op;
  Bf16Rows x;
  int32_t k_steps;

  // Gate and up alternate in tiles, so that a lane holds both.
  template <int kN>
  static constexpr int kTiles = kGateUp ? kN / 16 : kN / 8;
  template <int kN>
  __device__ int n_tiles() const {
    return (op.gate.tiles_per_expert + kTiles<kN> - 1) / kTiles<kN>;
  }
  template <int kN>
  __device__ int items() const {
    return *op.groups.num_chunks * n_tiles<kN>();
  }
  // CTAs that follow one another share activations; the chunks of an expert, its weights.
  template <int kN>
  __device__ GemmItem item(int i) const {
    const int32_t* chunk = op.groups.chunks + 4 * (i / n_tiles<kN>());
    return {chunk[0], chunk[1], i % n_tiles<kN>() * kTiles<kN>, chunk[3]};
  }
};

}  // namespace millrace::cuda
