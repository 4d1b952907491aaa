// Launches of the GEMM on warpgroup instructions: tensor maps, and which tile should take least. A file per
// weight format instantiates them (bf16_wgmma.cu, q8_wgmma.cu, mxfp4_wgmma.cu).
#pragma once

#include "kernels/cuda/gemm/cluster_schedule.h"
#include "kernels/cuda/gemm/wgmma_mainloop.cuh"
#include "kernels/cuda/tile/launch.cuh"

namespace millrace::cuda {

// By clusters (wgmma_cluster.cuh), of weights that are bf16 as they lie or dequantized.
void launch_cluster_gemm(const Gemm& op, GemmTile tile, const Launch& at);

template <int kMaxWidth, class Problem>
void launch_as(const Problem& p, int64_t items, const Launch& at) {
  constexpr size_t kShared = Problem::Layout::kBytes;
  const auto kernel = gemm_wgmma_kernel<kMaxWidth, Problem>;
  allow_shared_memory(kernel, kShared);
  const int64_t ctas = items < at.device.sm_count() ? items : at.device.sm_count();
  launch_dependent("gemm_wgmma_kernel", kernel, dim3(static_cast<unsigned>(ctas)), kGemmThreads, kShared, at,
                   p);
}
template <class Problem>
void launch_for(const Problem& p, int64_t max_rows, int64_t items, const Launch& at) {
  max_rows <= kWgmmaRows ? launch_as<kWgmmaRows>(p, items, at) : launch_as<2 * kWgmmaRows>(p, items, at);
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Boxes of so many tiles of weights x a K step.
template <PackedFormat kFormat>
CUtensorMap map_of(const Device& device, const uint8_t* tiles, int64_t count, uint32_t tile_bytes,
                   int box_tiles) {
  return ptx::byte_rows_map(device, tiles, static_cast<uint64_t>(count), tile_bytes,
                            static_cast<uint32_t>(box_tiles), TileFormat<kFormat>::kKStepBytes);
}
template <PackedFormat kFormat>
CUtensorMap map_of(const Device& device, const PackedMatrix& w, int64_t experts, int box_tiles) {
  return map_of<kFormat>(device, w.tiles, experts * w.tiles_per_expert, w.tile_bytes, box_tiles);
}
// Boxes of so many tiles of 64 rows x a K step.
inline CUtensorMap rows_map_of(const Device& device, const Bf16Rows& x, int64_t tiles, int32_t k_steps,
                               uint32_t box_tiles = 2) {
  constexpr int kKilobytes = kWgmmaTileBytes / 1024;
  return ptx::kilobyte_rows_map(device, x.data, static_cast<uint64_t>(tiles),
                                static_cast<uint64_t>(k_steps) * kKilobytes, box_tiles, kKilobytes);
}

template <PackedFormat kFormat, int kBoxes>
void launch_gemm_as(const WgmmaGemm& gemm, const Launch& at) {
  GemmProblem<kFormat, kBoxes> p{
      gemm, rows_map_of(at.device, gemm.x, divide_up(gemm.rows, kWgmmaRows), gemm.k_steps), {}};
  for (int i = 0; i < p.num_parts; ++i)
    p.maps[i] =
        map_of<kFormat>(at.device, p.parts[i].tiles, p.parts[i].num_tiles, p.tile_bytes, kBoxes * kBoxTiles);
  const int64_t rows = p.rows < p.tile_tokens ? p.rows : p.tile_tokens;
  launch_for(p, rows, p.template items<StageLayout<kFormat, kBoxes>::kOutputs>(), at);
}

// The tile that should take least. A round of each, in parts of what `millrace tune` measured for q, k, v
// and the projection of gpt-oss-20b in 8 bits on an H200: 64 outputs cost 0.67 to 0.73 of 128, 64 x 64 some
// 0.57, and with few rows only the weights count.
inline GemmTile fastest_tile(WgmmaGemm p, bool may_cluster, bool may_split, const Device& device) {
  const auto rounds = [&](int64_t items) { return divide_up(items, device.sm_count()); };
  p.tile_tokens = kWgmmaRows;
  const int64_t time_64x64 = (p.rows > kWgmmaRows ? 320 : 220) * rounds(p.items<64>());
  p.tile_tokens = 2 * kWgmmaRows;
  const int64_t time_64x128 = (p.rows > kWgmmaRows ? 385 : 220) * rounds(p.items<64>());
  const int64_t time_128x128 = (p.rows > kWgmmaRows ? 560 : p.rows > 32 ? 320 : 220) * rounds(p.items<128>());
  GemmTile best = GemmTile::k128x128;
  int64_t least = time_128x128;
  const auto consider = [&](GemmTile tile, int64_t time) {
    if (time < least) best = tile, least = time;
  };
  consider(GemmTile::k64x128, time_64x128);
  consider(GemmTile::k64x64, time_64x64);
  if (!may_cluster) return best;
  int32_t tiles[kMaxParts] = {};
  for (int i = 0; i < p.num_parts; ++i) tiles[i] = p.parts[i].num_tiles;
  const ClusterChoice choice(tiles, p.num_parts, p.rows, p.k_steps, device.sm_count() / kClusterCtas,
                             may_split);
  if (choice.shape >= 0) consider(GemmTile::kCluster, choice.time);
  return best;
}

template <PackedFormat kFormat>
void launch_wgmma_gemm(const Gemm& op, const Launch& at) {
  WgmmaGemm p = wgmma_gemm(op);
  GemmTile tile = op.tile;
  if (tile == GemmTile::kDefault || !supports_tile(tile, op))
    tile = fastest_tile(p, supports_tile(GemmTile::kCluster, op), op.split.totals != nullptr, at.device);
  p.tile_tokens = tile == GemmTile::k64x64 ? kWgmmaRows : 2 * kWgmmaRows;
  switch (tile) {
    case GemmTile::k128x128:
      return launch_gemm_as<kFormat, 2>(p, at);
    case GemmTile::k64x128:
    case GemmTile::k64x64:
      return launch_gemm_as<kFormat, 1>(p, at);
    default:
      return launch_cluster_gemm(op, tile, at);
  }
}

template <PackedFormat kFormat>
void launch_wgmma_grouped_gemm(const GroupedGemm& op, const Launch& at) {
  const int64_t tiles = op.gate.tiles_per_expert, chunks = op.groups.max_chunks;
  const int64_t max_rows = int64_t{op.groups.tiles_per_chunk} * op.groups.tile_rows;
  const CUtensorMap rows_map = rows_map_of(at.device, op.x, op.groups.max_rows / kWgmmaRows, op.gate.k_steps);
  if (op.up.format == PackedFormat::kNone) {
    const DownProblem<kFormat> p{{op, op.x, op.gate.k_steps},
                                 rows_map,
                                 {map_of<kFormat>(at.device, op.gate, op.experts, 2 * kBoxTiles)}};
    return launch_for(p, max_rows, divide_up(tiles, 2 * kBoxTiles) * chunks, at);
  }
  const GateUpProblem<kFormat> p{{op, op.x, op.gate.k_steps},
                                 rows_map,
                                 {map_of<kFormat>(at.device, op.gate, op.experts, kBoxTiles),
                                  map_of<kFormat>(at.device, op.up, op.experts, kBoxTiles)}};
  launch_for(p, max_rows, divide_up(tiles, kBoxTiles) * chunks, at);
}

}  // namespace millrace::cuda
