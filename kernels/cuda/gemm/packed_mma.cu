// GEMM with packed weights for GPUs without warpgroup instructions (Ampere, Ada): bf16 products by mma.sync,
// for every packed format. A CTA of eight warps has some tiles of 16 rows of activations and some of 8 rows
// of weights and loops over K, 64 columns a stage, both operands through a ring of stages in shared memory
// that all threads fill by asynchronous copies. A segment of K is one chain of products
// (tile/weight_format.cuh).
//
// Roofline: that of the tensor cores with mma.sync, some two thirds of what warpgroup instructions reach on
// Hopper; dequantizing is some 40 instructions per 8 x 64 weights, once for up to 64 rows of a warp.
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/moe/activation.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/weight_format.cuh"
#include "millrace/kernels/tile/ptx/async_copy.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kStages = 4;
constexpr int kTileTokens = kWarpRows;

// The tile of a CTA: tiles of 16 activation rows, tiles of 8 weight rows, and how they are divided among
// warps.
template <int kMTiles, int kNTiles, int kMWarps>
struct MmaConfig {
  static constexpr int kM = kMTiles, kN = kNTiles, kWarpsM = kMWarps, kWarpsN = 8 / kMWarps;
  static constexpr int kMPerWarp = kM / kWarpsM, kNPerWarp = kN / kWarpsN;
  static_assert(kMPerWarp * kWarpsM == kM && kNPerWarp * kWarpsN == kN);
};

// A stage: weights, then activations of one K step.
template <PackedFormat kFormat, class Config>
struct MmaStageLayout {
  static constexpr int kKStepBytes = TileFormat<kFormat>::kKStepBytes;
  static constexpr int kActivations = Config::kN * kKStepBytes;
  static constexpr int kTileBytes = 2048;  // of 16 rows
  static constexpr int kBytes = kActivations + Config::kM * kTileBytes;
};

struct MmaPart {
  const uint8_t* tiles;
  const float* bias;
  float* out;
  int64_t rows;
  int32_t num_tiles;
};
struct MmaParams {
  MmaPart parts[3];
  int32_t num_parts, total_tiles, k_steps;
  uint32_t tile_bytes;
  Bf16Rows x;
  int64_t rows;
  bool add;
};
struct MmaGroupedParams {
  GroupedGemm op;
  int32_t k_steps;
};

// All of K for the tile of one CTA.
template <PackedFormat kFormat, class Config>
class MmaMainloop {
 public:
  using Layout = MmaStageLayout<kFormat, Config>;
  float total[Config::kMPerWarp][Config::kNPerWarp][4];

  // tiles: shared, [kN] pointers to tiles of weights, null past the end; m_tiles: how many tiles of
  // activations there are from first_tile on.
  __device__ void run(uint8_t* shared, const uint8_t* const* tiles, const Bf16Rows& x, int64_t first_tile,
                      int m_tiles, int k_steps) {
    float acc[Config::kMPerWarp][Config::kNPerWarp][4];  // of a segment
#pragma unroll
    for (int m = 0; m < Config::kMPerWarp; ++m) {
#pragma unroll
      for (int n = 0; n < Config::kNPerWarp; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[m][n][i] = acc[m][n][i] = 0.0f;
      }
    }
    const int segment_k_steps = k_steps_per_segment(k_steps);
    for (int k_step = 0; k_step < kStages - 1; ++k_step) {
      if (k_step < k_steps)
        load(shared + k_step * Layout::kBytes, tiles, x, first_tile, m_tiles, k_steps, k_step);
      ptx::async_commit();
    }
    int left = segment_k_steps;
    for (int k_step = 0; k_step < k_steps; ++k_step) {
      ptx::async_wait<kStages - 2>();
      __syncthreads();  // everybody's copies of this stage are there, and the one before has been read
      const int next = k_step + kStages - 1;
      if (next < k_steps) {
        load(shared + next % kStages * Layout::kBytes, tiles, x, first_tile, m_tiles, k_steps, next);
      }
      ptx::async_commit();
      multiply(shared + k_step % kStages * Layout::kBytes, acc);
      if (--left == 0 || k_step + 1 == k_steps) {  // a segment ends
        left = segment_k_steps;
#pragma unroll
        for (int m = 0; m < Config::kMPerWarp; ++m) {
#pragma unroll
          for (int n = 0; n < Config::kNPerWarp; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              total[m][n][i] += acc[m][n][i];
              acc[m][n][i] = 0.0f;
            }
          }
        }
      }
    }
    ptx::async_wait<0>();
    unscale();
  }

 private:
  __device__ void unscale() {
#pragma unroll
    for (int m = 0; m < Config::kMPerWarp; ++m) {
#pragma unroll
      for (int n = 0; n < Config::kNPerWarp; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[m][n][i] *= TileFormat<kFormat>::kUnscale;
      }
    }
  }

  __device__ static void load(uint8_t* stage, const uint8_t* const* tiles, const Bf16Rows& x,
                              int64_t first_tile, int m_tiles, int k_steps, int k_step) {
    constexpr int kPairChunks = Layout::kKStepBytes / 16;
    for (int i = threadIdx.x; i < Config::kN * kPairChunks; i += kThreads) {
      const uint8_t* tile = tiles[i / kPairChunks];
      if (tile != nullptr) {
        ptx::async_copy16(stage + i * 16,
                          tile + int64_t{k_step} * Layout::kKStepBytes + i % kPairChunks * 16);
      }
    }
    constexpr int kTileChunks = Layout::kTileBytes / 16;
    for (int i = threadIdx.x; i < Config::kM * kTileChunks; i += kThreads) {
      if (i / kTileChunks < m_tiles) {
        ptx::async_copy16(stage + Layout::kActivations + i * 16,
                          x.data + ((first_tile + i / kTileChunks) * k_steps + k_step) * Layout::kTileBytes +
                              i % kTileChunks * 16);
      }
    }
  }

  __device__ static void multiply(const uint8_t* stage,
                                  float (&acc)[Config::kMPerWarp][Config::kNPerWarp][4]) {
    const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
    const int m0 = warp / Config::kWarpsN * Config::kMPerWarp,
              n0 = warp % Config::kWarpsN * Config::kNPerWarp;
    uint32_t b[Config::kNPerWarp][4][2];
#pragma unroll
    for (int n = 0; n < Config::kNPerWarp; ++n)
      TileFormat<kFormat>::load(stage + (n0 + n) * Layout::kKStepBytes, lane, b[n]);
#pragma unroll
    for (int m = 0; m < Config::kMPerWarp; ++m) {
      const auto* rows =
          reinterpret_cast<const uint4*>(stage + Layout::kActivations + (m0 + m) * Layout::kTileBytes);
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const uint4 words = rows[s * kWarpLanes + lane];
        const uint32_t a[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int n = 0; n < Config::kNPerWarp; ++n) ptx::mma_bf16(acc[m][n], a, b[n][s][0], b[n][s][1]);
      }
    }
  }
};

struct PartTile {
  int part, tile;
};
__device__ inline PartTile find_tile(const MmaParams& p, int tile) {
  int i = 0;
  while (i + 1 < p.num_parts && tile >= p.parts[i].num_tiles) tile -= p.parts[i++].num_tiles;
  return {i, tile};
}

// grid: x over tiles of weight rows, y over tiles of activation rows.
template <PackedFormat kFormat, class Config>
__global__ void __launch_bounds__(kThreads, 2) gemm_mma_kernel(const __grid_constant__ MmaParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ const uint8_t* tiles[Config::kN];
  const int first = static_cast<int>(blockIdx.x) * Config::kN;
  if (threadIdx.x < Config::kN) {
    const int at = first + static_cast<int>(threadIdx.x);
    const PartTile tile = find_tile(p, at);
    tiles[threadIdx.x] =
        at < p.total_tiles ? p.parts[tile.part].tiles + int64_t{tile.tile} * p.tile_bytes : nullptr;
  }
  ptx::let_dependents_start();
  __syncthreads();  // everybody: the pointers are there
  ptx::wait_for_previous();
  const int64_t first_tile = int64_t{blockIdx.y} * Config::kM;
  const int m_tiles =
      static_cast<int>(min(int64_t{Config::kM}, (p.rows + kTileTokens - 1) / kTileTokens - first_tile));
  MmaMainloop<kFormat, Config> mainloop;
  mainloop.run(shared, tiles, p.x, first_tile, m_tiles, p.k_steps);

  // The epilogue: lane (g, t) has rows g and g + 8 of a tile of activations, outputs 2t and 2t + 1 of one of
  // weights.
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < Config::kNPerWarp; ++n) {
    const int at = first + warp % Config::kWarpsN * Config::kNPerWarp + n;
    if (at >= p.total_tiles) continue;
    const PartTile tile = find_tile(p, at);
    const MmaPart& part = p.parts[tile.part];
#pragma unroll
    for (int m = 0; m < Config::kMPerWarp; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t token =
            (first_tile + warp / Config::kWarpsN * Config::kMPerWarp + m) * kTileTokens + g + i / 2 * 8;
        const int64_t row = int64_t{tile.tile} * kTileRows + 2 * t + i % 2;
        if (token >= p.rows || row >= part.rows) continue;
        const float value = mainloop.total[m][n][i] + (part.bias != nullptr ? part.bias[row] : 0.0f);
        float* to = part.out + token * part.rows + row;
        *to = p.add ? *to + value : value;
      }
    }
  }
}

// grid: x over tiles of weight rows (of gate and up, half of them each), y over chunks.
template <PackedFormat kFormat, class Config, bool kGateUp>
__global__ void __launch_bounds__(kThreads, 2)
    grouped_gemm_mma_kernel(const __grid_constant__ MmaGroupedParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ const uint8_t* tiles[Config::kN];
  const GroupedGemm& op = p.op;
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int chunk = blockIdx.y;
  if (chunk >= *op.groups.num_chunks) return;
  const int expert = op.groups.chunks[4 * chunk], first_tile = op.groups.chunks[4 * chunk + 1],
            m_tiles = op.groups.chunks[4 * chunk + 2];
  constexpr int kTiles = kGateUp ? Config::kN / 2 : Config::kN;  // of rows
  const int first = static_cast<int>(blockIdx.x) * kTiles;
  if (threadIdx.x < Config::kN) {
    const int i = threadIdx.x, tile = first + (kGateUp ? i / 2 : i);
    const PackedMatrix& w = kGateUp && i % 2 == 1 ? op.up : op.gate;
    tiles[i] = tile < w.tiles_per_expert
                   ? w.tiles + (int64_t{expert} * w.tiles_per_expert + tile) * w.tile_bytes
                   : nullptr;
  }
  __syncthreads();  // the pointers are there
  MmaMainloop<kFormat, Config> mainloop;
  mainloop.run(shared, tiles, op.x, first_tile, m_tiles, p.k_steps);

  // The epilogue: lane (g, t) has rows g and g + 8 of a tile of activations, outputs 2t and 2t + 1 of one of
  // weights.
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes, g = lane / 4, t = lane % 4;
  const int64_t rows = op.gate.rows;
#pragma unroll
  for (int m = 0; m < Config::kMPerWarp; ++m) {
    const int m_tile = warp / Config::kWarpsN * Config::kMPerWarp + m;
    if (m_tile >= m_tiles) continue;
#pragma unroll
    for (int n = 0; n < Config::kNPerWarp; n += kGateUp ? 2 : 1) {
      const int at = warp % Config::kWarpsN * Config::kNPerWarp + n;
      const int tile = first + (kGateUp ? at / 2 : at);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = int64_t{tile} * kTileRows + 2 * t + i % 2;
        const int32_t pair = op.groups.order[int64_t{first_tile + m_tile} * kTileTokens + g + i / 2 * 8];
        if (pair < 0 || row >= rows) continue;
        const int64_t bias_at = expert * rows + row;
        float value = mainloop.total[m][n][i] + (op.gate_bias != nullptr ? op.gate_bias[bias_at] : 0.0f);
        if constexpr (kGateUp) {
          const float up = mainloop.total[m][n + 1][i] + (op.up_bias != nullptr ? op.up_bias[bias_at] : 0.0f);
          value = activate(op.activation, value, up);
        }
        op.out[pair * rows + row] = value;
      }
    }
  }
}

using SmallBatch = MmaConfig<kMmaSmallBatchTiles, 8, 2>;        // 32 rows x 64 outputs: batches
using LargeBatch = MmaConfig<kMmaLargeBatchTiles, 8, 4>;        // 128 x 64: prefill
using LargeBatchNarrow = MmaConfig<kMmaLargeBatchTiles, 4, 4>;  // 128 x 32: when 64 would leave SMs idle

template <PackedFormat kFormat, class Config>
void launch_gemm_as(const MmaParams& p, const Launch& at) {
  constexpr size_t kShared = kStages * MmaStageLayout<kFormat, Config>::kBytes;
  const auto kernel = gemm_mma_kernel<kFormat, Config>;
  allow_shared_memory(kernel, kShared);
  constexpr int64_t kRows = Config::kM * kTileTokens;
  const dim3 grid(static_cast<unsigned>((p.total_tiles + Config::kN - 1) / Config::kN),
                  static_cast<unsigned>((p.rows + kRows - 1) / kRows));
  launch_dependent("gemm_mma_kernel", kernel, grid, kThreads, kShared, at, p);
}

template <PackedFormat kFormat>
void launch_gemm_for(const MmaParams& p, const Launch& at) {
  if (p.rows <= 32) return launch_gemm_as<kFormat, SmallBatch>(p, at);
  const int64_t ctas = (p.total_tiles + 7) / 8 * ((p.rows + 127) / 128);
  if (ctas < 2 * at.device.sm_count()) return launch_gemm_as<kFormat, LargeBatchNarrow>(p, at);
  launch_gemm_as<kFormat, LargeBatch>(p, at);
}

template <PackedFormat kFormat, class Config, bool kGateUp>
void launch_grouped_as(const MmaGroupedParams& p, const Launch& at) {
  constexpr size_t kShared = kStages * MmaStageLayout<kFormat, Config>::kBytes;
  const auto kernel = grouped_gemm_mma_kernel<kFormat, Config, kGateUp>;
  allow_shared_memory(kernel, kShared);
  constexpr int kTiles = kGateUp ? Config::kN / 2 : Config::kN;
  const dim3 grid(static_cast<unsigned>((p.op.gate.tiles_per_expert + kTiles - 1) / kTiles),
                  static_cast<unsigned>(p.op.groups.max_chunks));
  launch_dependent("grouped_gemm_mma_kernel", kernel, grid, kThreads, kShared, at, p);
}

template <PackedFormat kFormat>
void launch_grouped_for(const MmaGroupedParams& p, const Launch& at) {
  const bool gate_up = p.op.up.format != PackedFormat::kNone;
  if (p.op.groups.tiles_per_chunk == SmallBatch::kM) {
    gate_up ? launch_grouped_as<kFormat, SmallBatch, true>(p, at)
            : launch_grouped_as<kFormat, SmallBatch, false>(p, at);
  } else {
    gate_up ? launch_grouped_as<kFormat, LargeBatch, true>(p, at)
            : launch_grouped_as<kFormat, LargeBatch, false>(p, at);
  }
}

}  // namespace

void launch_mma_gemm(const Gemm& op, const Launch& at) {
  MmaParams p{};
  p.num_parts = op.num_parts;
  for (int i = 0; i < op.num_parts; ++i) {
    const Gemm::Part& part = op.parts[i];
    p.parts[i] = {part.w.tiles, part.bias, part.out, part.w.rows, part.w.tiles_per_expert};
    p.total_tiles += part.w.tiles_per_expert;
  }
  p.k_steps = op.parts[0].w.k_steps;
  p.tile_bytes = op.parts[0].w.tile_bytes;
  p.x = op.x;
  p.rows = op.rows;
  p.add = op.add;
  switch (op.parts[0].w.format) {
    case PackedFormat::kMxfp4:
      return launch_gemm_for<PackedFormat::kMxfp4>(p, at);
    case PackedFormat::kBf16:
      return launch_gemm_for<PackedFormat::kBf16>(p, at);
    case PackedFormat::kQ4:
      return launch_gemm_for<PackedFormat::kQ4>(p, at);
    case PackedFormat::kQ5:
      return launch_gemm_for<PackedFormat::kQ5>(p, at);
    case PackedFormat::kQ6:
      return launch_gemm_for<PackedFormat::kQ6>(p, at);
    default:
      return launch_gemm_for<PackedFormat::kQ8>(p, at);
  }
}

void launch_mma_grouped_gemm(const GroupedGemm& op, const Launch& at) {
  const MmaGroupedParams p{op, op.gate.k_steps};
  switch (op.gate.format) {
    case PackedFormat::kMxfp4:
      return launch_grouped_for<PackedFormat::kMxfp4>(p, at);
    case PackedFormat::kBf16:
      return launch_grouped_for<PackedFormat::kBf16>(p, at);
    case PackedFormat::kQ4:
      return launch_grouped_for<PackedFormat::kQ4>(p, at);
    case PackedFormat::kQ5:
      return launch_grouped_for<PackedFormat::kQ5>(p, at);
    case PackedFormat::kQ6:
      return launch_grouped_for<PackedFormat::kQ6>(p, at);
    default:
      return launch_grouped_for<PackedFormat::kQ8>(p, at);
  }
}

}  // namespace millrace::cuda
