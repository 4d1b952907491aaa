// Backward of block-sparse calls: the lists have the blocks of keys of every block of queries, and a CTA of
// backward has a tile of keys. So the lists are turned round once, into the workspace: for every tile of keys
// of a KV head the tiles of queries that have some of them, head by head of the group, and how many later
// tiles of keys each of those has, which is its turn to add to dQ.
#pragma once

#include "kernels/cuda/attention/flash_backward_call.h"
#include "kernels/cuda/attention/flash_problem.cuh"

namespace millrace::cuda {

// One step of a CTA.
struct FlashVisit {
  uint32_t x, y;
  static constexpr int kTileBits = 28, kTurnBits = 20;
  __device__ static FlashVisit of(int32_t tile, uint32_t seen, int32_t turn, int32_t in_group) {
    return {static_cast<uint32_t>(tile) | seen << kTileBits,
            static_cast<uint32_t>(turn) | static_cast<uint32_t>(in_group) << kTurnBits};
  }
  __device__ int32_t tile() const { return static_cast<int32_t>(x & ((1u << kTileBits) - 1)); }
  // Bit i + 2j: whether queries of half j of the tile have keys of half i (of 64 each) in their list.
  __device__ uint32_t seen() const { return x >> kTileBits; }
  __device__ int32_t turn() const { return static_cast<int32_t>(y & ((1u << kTurnBits) - 1)); }
  __device__ int32_t in_group() const { return static_cast<int32_t>(y >> kTurnBits); }
};
static_assert(sizeof(FlashVisit) == kFlashVisitBytes);

struct FlashVisits {
  FlashVisit* entries;  // [batch, kv_heads, key_tiles][stride]
  int32_t* counts;      // [batch, kv_heads, key_tiles]
  int32_t key_tiles;
  int64_t stride;  // group * query_tiles
  __device__ int64_t list(const FlashShape& s, int32_t b, int32_t kv_head, int32_t tile) const {
    return (int64_t{b} * s.kv_heads + kv_head) * key_tiles + tile;
  }
};

struct FlashLists {
  int32_t block_q, block_k, q_blocks;
  const int32_t *row_starts, *columns;
};

// What tile `tile` of kQueries of a head has of tile `key_tile` of 128 keys: halves as FlashVisit::seen, and
// how many tiles of keys behind it, of key_tiles. The head's lists begin at head_row.
template <int kQueries>
__device__ inline uint32_t flash_visit_of(const FlashLists& lists, int64_t head_row, int32_t tile,
                                          int32_t key_tile, int32_t key_tiles, int32_t* turn) {
  const int32_t per = kFlashBackwardKeys / lists.block_k, block = tile * kQueries / lists.block_q;
  const bool two = kQueries > lists.block_q && block + 1 < lists.q_blocks;  // lists
  const int32_t* row = lists.row_starts + head_row + block;
  int32_t at[2] = {row[0], row[1]};
  const int32_t end[2] = {row[1], two ? row[2] : row[1]};
  uint32_t seen = 0;
  int32_t behind = 0, last = -1;
  for (;;) {
    constexpr int32_t kNone = 1 << 30;
    const int32_t c0 = at[0] < end[0] ? lists.columns[at[0]] : kNone,
                  c1 = at[1] < end[1] ? lists.columns[at[1]] : kNone, column = min(c0, c1);
    if (column / per >= key_tiles) break;  // none, or past the keys
    if (column / per == key_tile) {
      const uint32_t keys = per == 1 ? 3u : 1u << (column % 2);
      if (kQueries <= lists.block_q) {
        seen |= keys | keys << 2;
      } else {
        seen |= (c0 == column ? keys : 0u) | (c1 == column ? keys << 2 : 0u);
      }
    } else if (column / per > key_tile && column / per != last) {
      last = column / per;
      ++behind;
    }
    at[0] += c0 == column ? 1 : 0, at[1] += c1 == column ? 1 : 0;
  }
  *turn = behind;
  return seen;
}

// A warp a list. Grid: kFlashVisitWarps lists each.
inline constexpr int kFlashVisitWarps = 4;
template <int kQueries>
__global__ void __launch_bounds__(kFlashVisitWarps* kWarpLanes)
    flash_visits_kernel(const __grid_constant__ FlashShape s, const FlashLists lists,
                        const FlashVisits visits) {
  const int64_t list = int64_t{blockIdx.x} * kFlashVisitWarps + threadIdx.x / kWarpLanes;
  const auto lane = static_cast<int32_t>(threadIdx.x % kWarpLanes);
  if (list >= int64_t{s.batch} * s.kv_heads * visits.key_tiles) return;
  const auto key_tile = static_cast<int32_t>(list % visits.key_tiles);
  const auto kv_head = static_cast<int32_t>(list / visits.key_tiles % s.kv_heads),
             b = static_cast<int32_t>(list / visits.key_tiles / s.kv_heads);
  const FlashSequence seq(s, b);
  const int32_t tiles = (seq.q_len + kQueries - 1) / kQueries,
                key_tiles = (seq.k_len + kFlashBackwardKeys - 1) / kFlashBackwardKeys;
  FlashVisit* to = visits.entries + list * visits.stride;
  int32_t count = 0;
  for (int32_t g = 0; g < s.group; ++g) {
    const int64_t head_row = (int64_t{b} * s.heads + kv_head * s.group + g) * lists.q_blocks;
    for (int32_t from = 0; from < tiles; from += kWarpLanes) {
      const int32_t tile = from + lane;
      int32_t turn = 0;
      const uint32_t seen =
          tile < tiles ? flash_visit_of<kQueries>(lists, head_row, tile, key_tile, key_tiles, &turn) : 0u;
      const uint32_t found = __ballot_sync(kAllLanes, seen != 0);
      if (seen != 0) to[count + __popc(found & ((1u << lane) - 1))] = FlashVisit::of(tile, seen, turn, g);
      count += __popc(found);
    }
  }
  if (lane == 0) visits.counts[list] = count;
}

}  // namespace millrace::cuda
