// How latent_wgmma.cu cuts its work: tiles, shared memory, the rows of a CTA.
#pragma once

#include "kernels/cuda/attention/latent_cache.cuh"
#include "kernels/cuda/attention/paged_tile.cuh"

namespace millrace::cuda::latent {

inline constexpr int kRope = 64;
inline constexpr int kKeys = 64;  // positions of a tile
inline constexpr int kPages = kKeys / kBlockTokens;
inline constexpr int kTilesOfSplit = kSplitKeys / kKeys;
inline constexpr int kGroups = 2;  // consumer warpgroups
inline constexpr int kConsumers = kGroups * ptx::kWarpgroupThreads,
                     kThreads = kConsumers + ptx::kWarpgroupThreads;
inline constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;  // of 168 that a thread begins with
inline constexpr int kConsumerWarps = kConsumers / kWarpLanes;
inline constexpr int kPartBytes =
    kKeys * ptx::kSwizzleRowBytes;             // 64 dimensions of a tile, and of the queries
inline constexpr int kProbStride = kKeys + 8;  // so that eight rows begin in different banks
static_assert(kLatentRows == kKeys);

// Shared memory, in bytes.
template <int kRank, bool kFp8>
struct Shape {
  static constexpr int kDim = kRope + kRank, kParts = kDim / 64;
  static constexpr int kTileBytes = kParts * kPartBytes;
  static constexpr int kRawPageBytes = kLatentScaleBytes + kBlockTokens * kDim;  // of fp8
  static constexpr int kStages = kRank == 512 ? 2 : 3;
  static constexpr int kStageBytes = kFp8 ? kPages * kRawPageBytes : kTileBytes;
  static constexpr int kQueriesAt = 0, kTileAt = kTileBytes;  // kTileAt: what fp8 is converted to
  static constexpr int kStagesAt = kTileAt + (kFp8 ? kTileBytes : 0);
  static constexpr int kProbsAt = kStagesAt + kStages * kStageBytes;
  static constexpr int kRowsAt = kProbsAt + kLatentRows * kProbStride * 2;  // [2][64] maxima or sums
  static constexpr int kBarriersAt = kRowsAt + kGroups * kLatentRows * 4;
  static constexpr int kBytes = kBarriersAt + 2 * kStages * 8;
  static_assert(kBytes <= 227 * 1024 && kBarriersAt % 8 == 0);
};

// Rows of one sequence and their heads.
struct Item {
  int32_t first_row, tokens, position;
  int first_head, heads;  // heads: of a token, as rows of the product
  const int32_t* table;
  int32_t first_tile, past_tile;
  __device__ int32_t last() const { return position + tokens - 1; }
};

__device__ inline Item item_of(const LatentAttention& p, int32_t split) {
  const int heads = min(p.cache.heads, kLatentRows), head_parts = (p.cache.heads + heads - 1) / heads;
  const int32_t index = static_cast<int32_t>(blockIdx.x) / head_parts;
  Item item;
  item.first_head = static_cast<int>(blockIdx.x) % head_parts * heads;
  item.heads = heads;
  if (p.chunks != nullptr) {
    const int4 chunk = reinterpret_cast<const int4*>(p.chunks)[index];
    item.first_row = chunk.x, item.tokens = chunk.y, item.position = chunk.z;
  } else {
    item.first_row = index, item.tokens = 1, item.position = p.cache.positions[index];
  }
  item.table = table_of_row(p.cache, item.first_row, 0);
  item.first_tile = split >= 0 ? split * kTilesOfSplit : 0;
  item.past_tile = item.last() / kKeys + 1;
  if (split >= 0) item.past_tile = min(item.past_tile, (split + 1) * kTilesOfSplit);
  return item;
}

}  // namespace millrace::cuda::latent
