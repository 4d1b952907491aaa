// The wide products for GPUs without warpgroup instructions, and what goes before the products on all: rows
// rounded into operands, pairs of tokens and experts sorted. A CTA of eight warps owns some tiles of 16 rows
// of activations and some of 8 rows of weights and walks the columns a pair of blocks at a time, both
// operands through a ring of stages in shared memory. A segment is one chain of products (tile_format.cuh).
//
// Roofline: that of the tensor cores with mma.sync, some two thirds of what warpgroup instructions reach on
// Hopper; decoding is some 40 instructions per 8 x 64 weights, once for up to 64 rows of a warp.
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemv/row.cuh"
#include "kernels/cuda/gemv/tile_ring.cuh"
#include "kernels/cuda/moe/activation.cuh"
#include "kernels/cuda/ptx/async_copy.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "kernels/cuda/tile/weight_format.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kStages = 4;
constexpr int kTileTokens = kWarpRows;

// One shape of CTA: tiles of 16 activation rows, tiles of 8 weight rows, and how warps share them.
template <int kMTiles, int kNTiles, int kMWarps>
struct WideConfig {
  static constexpr int kM = kMTiles, kN = kNTiles, kWarpsM = kMWarps, kWarpsN = 8 / kMWarps;
  static constexpr int kMPerWarp = kM / kWarpsM, kNPerWarp = kN / kWarpsN;
  static_assert(kMPerWarp * kWarpsM == kM && kNPerWarp * kWarpsN == kN);
};

// A stage: weights, then activations of one pair.
template <PackedFormat kFormat, class Config>
struct StageLayout {
  static constexpr int kPairBytes = TileFormat<kFormat>::kPairBytes;
  static constexpr int kActivations = Config::kN * kPairBytes;
  static constexpr int kTileBytes = 2048;  // of 16 rows
  static constexpr int kBytes = kActivations + Config::kM * kTileBytes;
};

struct WidePart {
  const uint8_t* tiles;
  const float* bias;
  float* out;
  int64_t rows;
  int32_t num_tiles;
};
struct WideParams {
  WidePart parts[3];
  int32_t num_parts, total_tiles, pairs;
  uint32_t tile_bytes;
  WideRows x;
  int64_t rows;
  bool add;
};
struct WideExpertParams {
  WideExperts op;
  int32_t pairs;
};

// The columns of one CTA: tile pointers of its weights, its first tile of activations.
template <PackedFormat kFormat, class Config>
class WideLoop {
 public:
  using Layout = StageLayout<kFormat, Config>;
  float total[Config::kMPerWarp][Config::kNPerWarp][4];

  // tiles: shared, [kN] pointers, null past the end; m_tiles: how many tiles of activations there are from
  // first on.
  __device__ void run(uint8_t* shared, const uint8_t* const* tiles, const WideRows& x, int64_t first_tile,
                      int m_tiles, int pairs) {
    float sum[Config::kMPerWarp][Config::kNPerWarp][4];
#pragma unroll
    for (int m = 0; m < Config::kMPerWarp; ++m) {
#pragma unroll
      for (int n = 0; n < Config::kNPerWarp; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[m][n][i] = sum[m][n][i] = 0.0f;
      }
    }
    const int per = pairs_per_segment(pairs);
    for (int p = 0; p < kStages - 1; ++p) {
      if (p < pairs) load(shared + p * Layout::kBytes, tiles, x, first_tile, m_tiles, pairs, p);
      ptx::async_commit();
    }
    int left = per;
    for (int p = 0; p < pairs; ++p) {
      ptx::async_wait<kStages - 2>();
      __syncthreads();  // everybody's copies of stage p are there, and its predecessor has been read
      const int next = p + kStages - 1;
      if (next < pairs) {
        load(shared + next % kStages * Layout::kBytes, tiles, x, first_tile, m_tiles, pairs, next);
      }
      ptx::async_commit();
      multiply(shared + p % kStages * Layout::kBytes, sum);
      if (--left == 0 || p + 1 == pairs) {  // a segment ends
        left = per;
#pragma unroll
        for (int m = 0; m < Config::kMPerWarp; ++m) {
#pragma unroll
          for (int n = 0; n < Config::kNPerWarp; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              total[m][n][i] += sum[m][n][i];
              sum[m][n][i] = 0.0f;
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

  __device__ static void load(uint8_t* stage, const uint8_t* const* tiles, const WideRows& x,
                              int64_t first_tile, int m_tiles, int pairs, int p) {
    constexpr int kPairChunks = Layout::kPairBytes / 16;
    for (int i = threadIdx.x; i < Config::kN * kPairChunks; i += kThreads) {
      const uint8_t* tile = tiles[i / kPairChunks];
      if (tile != nullptr) {
        ptx::async_copy16(stage + i * 16, tile + int64_t{p} * Layout::kPairBytes + i % kPairChunks * 16);
      }
    }
    constexpr int kTileChunks = Layout::kTileBytes / 16;
    for (int i = threadIdx.x; i < Config::kM * kTileChunks; i += kThreads) {
      if (i / kTileChunks < m_tiles) {
        ptx::async_copy16(stage + Layout::kActivations + i * 16,
                          x.data + ((first_tile + i / kTileChunks) * pairs + p) * Layout::kTileBytes +
                              i % kTileChunks * 16);
      }
    }
  }

  __device__ static void multiply(const uint8_t* stage,
                                  float (&sum)[Config::kMPerWarp][Config::kNPerWarp][4]) {
    const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
    const int m0 = warp / Config::kWarpsN * Config::kMPerWarp,
              n0 = warp % Config::kWarpsN * Config::kNPerWarp;
    uint32_t b[Config::kNPerWarp][4][2];
#pragma unroll
    for (int n = 0; n < Config::kNPerWarp; ++n)
      TileFormat<kFormat>::load(stage + (n0 + n) * Layout::kPairBytes, lane, b[n]);
#pragma unroll
    for (int m = 0; m < Config::kMPerWarp; ++m) {
      const auto* rows =
          reinterpret_cast<const uint4*>(stage + Layout::kActivations + (m0 + m) * Layout::kTileBytes);
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const uint4 words = rows[s * kWarpLanes + lane];
        const uint32_t a[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int n = 0; n < Config::kNPerWarp; ++n) ptx::mma_bf16(sum[m][n], a, b[n][s][0], b[n][s][1]);
      }
    }
  }
};

struct WideTile {
  int part, tile;
};
__device__ inline WideTile find_tile(const WideParams& p, int tile) {
  int i = 0;
  while (i + 1 < p.num_parts && tile >= p.parts[i].num_tiles) tile -= p.parts[i++].num_tiles;
  return {i, tile};
}

// grid: x over tiles of weight rows, y over tiles of activation rows.
template <PackedFormat kFormat, class Config>
__global__ void __launch_bounds__(kThreads, 2) wide_linear_kernel(const __grid_constant__ WideParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ const uint8_t* tiles[Config::kN];
  const int first = static_cast<int>(blockIdx.x) * Config::kN;
  if (threadIdx.x < Config::kN) {
    const int at = first + static_cast<int>(threadIdx.x);
    const WideTile tile = find_tile(p, at);
    tiles[threadIdx.x] =
        at < p.total_tiles ? p.parts[tile.part].tiles + int64_t{tile.tile} * p.tile_bytes : nullptr;
  }
  ptx::let_dependents_start();
  __syncthreads();  // the pointers are there
  ptx::wait_for_previous();
  const int64_t first_tile = int64_t{blockIdx.y} * Config::kM;
  const int m_tiles =
      static_cast<int>(min(int64_t{Config::kM}, (p.rows + kTileTokens - 1) / kTileTokens - first_tile));
  WideLoop<kFormat, Config> loop;
  loop.run(shared, tiles, p.x, first_tile, m_tiles, p.pairs);

  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < Config::kNPerWarp; ++n) {
    const int at = first + warp % Config::kWarpsN * Config::kNPerWarp + n;
    if (at >= p.total_tiles) continue;
    const WideTile tile = find_tile(p, at);
    const WidePart& part = p.parts[tile.part];
#pragma unroll
    for (int m = 0; m < Config::kMPerWarp; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t token =
            (first_tile + warp / Config::kWarpsN * Config::kMPerWarp + m) * kTileTokens + g + i / 2 * 8;
        const int64_t row = int64_t{tile.tile} * kTileRows + 2 * t + i % 2;
        if (token >= p.rows || row >= part.rows) continue;
        const float value = loop.total[m][n][i] + (part.bias != nullptr ? part.bias[row] : 0.0f);
        float* to = part.out + token * part.rows + row;
        *to = p.add ? *to + value : value;
      }
    }
  }
}

// grid: x over tiles of weight rows (of gate and up, half of them each), y over chunks.
template <PackedFormat kFormat, class Config, bool kGateUp>
__global__ void __launch_bounds__(kThreads, 2)
    wide_experts_kernel(const __grid_constant__ WideExpertParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ const uint8_t* tiles[Config::kN];
  const WideExperts& op = p.op;
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
  WideLoop<kFormat, Config> loop;
  loop.run(shared, tiles, op.x, first_tile, m_tiles, p.pairs);

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
        float value = loop.total[m][n][i] + (op.gate_bias != nullptr ? op.gate_bias[bias_at] : 0.0f);
        if constexpr (kGateUp) {
          const float up = loop.total[m][n + 1][i] + (op.up_bias != nullptr ? op.up_bias[bias_at] : 0.0f);
          value = activate(op.activation, value, up);
        }
        op.out[pair * rows + row] = value;
      }
    }
  }
}

// Quad q of row i: two neighbours each, where column_position has them.
__device__ inline void store_quad(const WideRound& op, int64_t i, int pairs, int q, uint2 words,
                                  bool swizzled) {
  const auto first = static_cast<uint32_t>(q % 16 * 4);
  const uint32_t at[2] = {column_position(op.weights, first), column_position(op.weights, first + 2)};
  const uint32_t word[2] = {words.x, words.y};
  if (swizzled) {
    uint8_t* tile = op.to.data + (i / kWgmmaRows * pairs + q / 16) * kWgmmaTileBytes;
    const auto row = static_cast<uint32_t>(i % kWgmmaRows);
#pragma unroll
    for (int j = 0; j < 2; ++j) *reinterpret_cast<uint32_t*>(tile + ptx::swizzled(row, at[j] * 2)) = word[j];
    return;
  }
  // [step][lane] of rows g, g + 8 of columns 2t and 2t + 1, then of columns 2t + 8 and 2t + 9.
  uint8_t* tile = op.to.data + (i / kTileTokens * pairs + q / 16) * (4 * kWarpLanes * 16);
  const auto row = static_cast<uint32_t>(i % kTileTokens);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t lane = row % 8 * 4 + at[j] % 8 / 2;
    *reinterpret_cast<uint32_t*>(tile + (at[j] / 16 * kWarpLanes + lane) * 16 + at[j] % 16 / 8 * 8 +
                                 row / 8 * 4) = word[j];
  }
}

// One CTA per row.
__global__ void __launch_bounds__(kRoundThreads)
    wide_round_kernel(const __grid_constant__ WideRound op, bool swizzled) {
  __shared__ float partial[kRoundWarps];
  ptx::let_dependents_start();
  const int cols = static_cast<int>(op.cols), pairs = packed_pairs(cols);
  RowQuads weight;
  weight.load<false>(op.norm_weight, cols / 4);
  ptx::wait_for_previous();
  const int64_t i = blockIdx.x, source = op.source_rows != nullptr ? op.source_rows[i] : i;
  round_rows<1>(
      1, [&](int) { return op.x + source * op.cols; }, op.norm_weight, weight, op.eps, cols, partial,
      [&](int, int q, uint2 words) {
        for (int c = 0; c < op.copies; ++c) {
          const int64_t to = op.places != nullptr ? __ldg(op.places + i * op.copies + c) : i;
          store_quad(op, to, pairs, q, words, swizzled);
        }
      });
}

// One CTA. Within an expert rows come in whatever order the atomics give: no row's result depends on it.
__global__ void __launch_bounds__(1024)
    group_experts_kernel(const int32_t* chosen, int64_t pairs, int32_t experts, ExpertGroups groups) {
  extern __shared__ int32_t counts[];  // [experts], then where each expert's next row goes
  int32_t* next = counts + experts;
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
  for (int64_t i = threadIdx.x; i < groups.max_rows; i += blockDim.x) groups.order[i] = -1;
  __syncthreads();  // zeros before counts
  for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) atomicAdd(&counts[__ldcg(chosen + i)], 1);
  __syncthreads();  // counted
  if (threadIdx.x == 0) {
    int32_t tile = 0, chunk = 0;
    for (int32_t e = 0; e < experts; ++e) {
      next[e] = tile * groups.tile_rows;
      int32_t rows = counts[e], tiles = (rows + groups.tile_rows - 1) / groups.tile_rows;
      while (tiles > 0) {
        const int32_t here = min(tiles, groups.tiles_per_chunk);
        groups.chunks[4 * chunk] = e;
        groups.chunks[4 * chunk + 1] = tile;
        groups.chunks[4 * chunk + 2] = here;
        groups.chunks[4 * chunk + 3] = min(rows, here * groups.tile_rows);
        rows -= here * groups.tile_rows;
        ++chunk;
        tile += here;
        tiles -= here;
      }
    }
    *groups.num_chunks = chunk;
  }
  __syncthreads();  // placed
  for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    const int32_t row = atomicAdd(&next[__ldcg(chosen + i)], 1);
    groups.order[row] = static_cast<int32_t>(i);
    groups.places[i] = row;
  }
}

using FewRows = WideConfig<2, 8, 2>;   // 32 rows x 64 outputs: batches
using ManyRows = WideConfig<8, 8, 4>;  // 128 x 64: prefill
using ManyThin = WideConfig<8, 4, 4>;  // 128 x 32: when 64 would leave SMs idle

template <PackedFormat kFormat, class Config>
void launch_linear_as(const WideParams& p, const Launch& at) {
  constexpr size_t kShared = kStages * StageLayout<kFormat, Config>::kBytes;
  const auto kernel = wide_linear_kernel<kFormat, Config>;
  allow_shared_memory(kernel, kShared);
  constexpr int64_t kRows = Config::kM * kTileTokens;
  const dim3 grid(static_cast<unsigned>((p.total_tiles + Config::kN - 1) / Config::kN),
                  static_cast<unsigned>((p.rows + kRows - 1) / kRows));
  launch_dependent("wide_linear_kernel", kernel, grid, kThreads, kShared, at, p);
}

template <PackedFormat kFormat>
void launch_linear_for(const WideParams& p, const Launch& at) {
  if (p.rows <= 32) return launch_linear_as<kFormat, FewRows>(p, at);
  const int64_t ctas = (p.total_tiles + 7) / 8 * ((p.rows + 127) / 128);
  if (ctas < 2 * at.device.sm_count()) return launch_linear_as<kFormat, ManyThin>(p, at);
  launch_linear_as<kFormat, ManyRows>(p, at);
}

template <PackedFormat kFormat, class Config, bool kGateUp>
void launch_experts_as(const WideExpertParams& p, const Launch& at) {
  constexpr size_t kShared = kStages * StageLayout<kFormat, Config>::kBytes;
  const auto kernel = wide_experts_kernel<kFormat, Config, kGateUp>;
  allow_shared_memory(kernel, kShared);
  constexpr int kTiles = kGateUp ? Config::kN / 2 : Config::kN;
  const dim3 grid(static_cast<unsigned>((p.op.gate.tiles_per_expert + kTiles - 1) / kTiles),
                  static_cast<unsigned>(p.op.groups.max_chunks));
  launch_dependent("wide_experts_kernel", kernel, grid, kThreads, kShared, at, p);
}

template <PackedFormat kFormat>
void launch_experts_for(const WideExpertParams& p, const Launch& at) {
  const bool gate_up = p.op.up.format != PackedFormat::kNone;
  if (p.op.groups.tiles_per_chunk == FewRows::kM) {
    gate_up ? launch_experts_as<kFormat, FewRows, true>(p, at)
            : launch_experts_as<kFormat, FewRows, false>(p, at);
  } else {
    gate_up ? launch_experts_as<kFormat, ManyRows, true>(p, at)
            : launch_experts_as<kFormat, ManyRows, false>(p, at);
  }
}

int64_t tile_rows(const Device& device) { return device.has_wgmma() ? kWgmmaRows : kWarpRows; }
int64_t tile_rows_for(int64_t rows, const Device& device) {
  return (rows + tile_rows(device) - 1) / tile_rows(device) * tile_rows(device);
}

// What is chosen for this shape, or kDefault.
WideItems tuned_items(const WideLinear& op, const Tuning& tuning) {
  if (tuning.empty() || op.num_parts == 0) return WideItems::kDefault;
  int64_t outputs = 0;
  for (int i = 0; i < op.num_parts; ++i) outputs += op.parts[i].w.rows;
  return tuning.items(op.parts[0].w.format, outputs, op.parts[0].w.cols, op.rows);
}

}  // namespace

size_t wide_rows_bytes(int64_t rows, int64_t cols, const Device& device) {
  return static_cast<size_t>(tile_rows_for(rows, device)) * static_cast<size_t>(packed_pairs(cols)) *
         kPairColumns * 2;
}

void launch_wide_round(const WideRound& op, const Launch& at) {
  if (op.rows == 0) return;
  launch_dependent("wide_round_kernel", wide_round_kernel, dim3(static_cast<unsigned>(op.rows)),
                   kRoundThreads, 0, at, op, at.device.has_wgmma());
}

void launch_wide_linear(const WideLinear& wanted, const Launch& at) {
  if (wanted.rows == 0) return;
  WideLinear op = wanted;
  if (op.items == WideItems::kDefault) op.items = tuned_items(op, at.device.tuning());
  WideParams p{};
  p.num_parts = op.num_parts;
  for (int i = 0; i < op.num_parts; ++i) {
    const WideLinear::Part& part = op.parts[i];
    p.parts[i] = {part.w.tiles, part.bias, part.out, part.w.rows, part.w.tiles_per_expert};
    p.total_tiles += part.w.tiles_per_expert;
  }
  if (p.total_tiles == 0) return;
  const bool wgmma = at.device.has_wgmma();
  p.pairs = op.parts[0].w.pairs;
  p.tile_bytes = op.parts[0].w.tile_bytes;
  p.x = op.x;
  p.rows = op.rows;
  p.add = op.add;
  switch (op.parts[0].w.format) {
    case PackedFormat::kMx4:
      return wgmma ? launch_wgmma_linear<PackedFormat::kMx4>(op, at)
                   : launch_linear_for<PackedFormat::kMx4>(p, at);
    case PackedFormat::kBf16:
      return wgmma ? launch_wgmma_linear<PackedFormat::kBf16>(op, at)
                   : launch_linear_for<PackedFormat::kBf16>(p, at);
    default:
      return wgmma ? launch_wgmma_linear<PackedFormat::kQ8>(op, at)
                   : launch_linear_for<PackedFormat::kQ8>(p, at);
  }
}

ExpertGroups expert_groups(int32_t* base, int64_t pairs, int32_t experts, const Device& device) {
  ExpertGroups groups;
  const int64_t touched = pairs < experts ? pairs : experts;
  // Many rows per expert: large tiles; else small ones, whose padding costs less.
  const bool many = pairs > int64_t{experts} * 48;
  groups.tiles_per_chunk = device.has_wgmma() ? (many ? 2 : 1) : many ? ManyRows::kM : FewRows::kM;
  groups.tile_rows = static_cast<int32_t>(tile_rows(device));
  groups.max_rows = (pairs / tile_rows(device) + touched) * tile_rows(device);
  groups.max_chunks = static_cast<int32_t>(pairs / (tile_rows(device) * groups.tiles_per_chunk) + touched);
  groups.order = base;
  groups.places = base + groups.max_rows;
  groups.chunks = groups.places + pairs;
  groups.num_chunks = groups.chunks + 4 * int64_t{groups.max_chunks};
  return groups;
}

size_t expert_groups_ints(int64_t pairs, int32_t experts, const Device& device) {
  // The smaller tiles have more chunks: room for either.
  const int64_t touched = pairs < experts ? pairs : experts;
  return static_cast<size_t>((pairs / tile_rows(device) + touched) * (tile_rows(device) + 4) + pairs + 1);
}

void launch_group_experts(const int32_t* chosen, int64_t pairs, int32_t experts, const ExpertGroups& groups,
                          const Launch& at) {
  if (pairs == 0) return;
  const size_t shared_bytes = 2 * static_cast<size_t>(experts) * sizeof(int32_t);
  launch_dependent("group_experts_kernel", group_experts_kernel, dim3(1), 1024, shared_bytes, at, chosen,
                   pairs, experts, groups);
}

void launch_wide_experts(const WideExperts& op, const Launch& at) {
  const WideExpertParams p{op, op.gate.pairs};
  if (op.groups.max_chunks == 0 || op.gate.tiles_per_expert == 0) return;
  const bool wgmma = at.device.has_wgmma();
  switch (op.gate.format) {
    case PackedFormat::kMx4:
      return wgmma ? launch_wgmma_experts<PackedFormat::kMx4>(op, at)
                   : launch_experts_for<PackedFormat::kMx4>(p, at);
    case PackedFormat::kBf16:
      return wgmma ? launch_wgmma_experts<PackedFormat::kBf16>(op, at)
                   : launch_experts_for<PackedFormat::kBf16>(p, at);
    default:
      return wgmma ? launch_wgmma_experts<PackedFormat::kQ8>(op, at)
                   : launch_experts_for<PackedFormat::kQ8>(p, at);
  }
}

}  // namespace millrace::cuda
