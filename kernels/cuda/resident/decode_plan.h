// The shape of a resident decode and how its keys are cut into splits; plain C++, tested without a GPU.
#pragma once

#include <cstdint>

namespace millrace::cuda::resident {

struct ResidentShape {
  int32_t batch_heads, kv_heads, head_dim, max_seq;

  constexpr int32_t group() const { return batch_heads / kv_heads; }
  constexpr int32_t padded_dim() const { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }
  // Rows of a tile: half of an MMA tile is left out where a group needs only the other.
  constexpr int32_t tile_rows() const { return group() <= 8 ? 8 : 16; }
  constexpr int32_t row_tiles() const { return (group() + tile_rows() - 1) / tile_rows(); }
  constexpr int32_t tiles() const { return kv_heads * row_tiles(); }
};

// Up to so many keys one block does a tile alone.
inline constexpr int32_t kMaxKeysOfOneBlock = 256;
// More splits cost more in the last block's reduction than they gain.
inline constexpr int32_t kMaxSplits = 64;
inline constexpr int32_t kKeysPerStep = 16;  // of a warp: the depth of one product with V

// Keys [s * keys_per_split, (s + 1) * keys_per_split) are split s's; a multiple of kKeysPerStep.
struct SplitPlan {
  int32_t splits, keys_per_split;
  bool cluster =
      false;  // splits of a tile are added up in each other's shared memory (sm_90 on), else in global memory
};
inline constexpr int32_t kMaxCluster = 16;
// least_keys: what a split has at least; 0: an eighth of the keys, but 128 to 256, a pass of a block's warps.
// Below, warps have nothing to do; above, blocks take turns while other SMs have nothing (measured on an
// H200).
constexpr SplitPlan plan_splits(int32_t keys, int32_t tiles, int32_t sm_count, int32_t least_keys = 0,
                                int32_t max_splits = kMaxSplits) {
  if (keys <= kMaxKeysOfOneBlock) return {1, kMaxKeysOfOneBlock};
  if (least_keys == 0) least_keys = keys < 1024 ? 128 : keys > 2048 ? 256 : keys / 8;
  int32_t splits = (keys + least_keys - 1) / least_keys;
  const int32_t fill = sm_count / tiles;  // blocks for every SM
  if (splits > fill) splits = fill;
  if (splits > max_splits) splits = max_splits;
  if (splits < 1) splits = 1;
  const int32_t per_split = ((keys + splits - 1) / splits + kKeysPerStep - 1) / kKeysPerStep * kKeysPerStep;
  return {(keys + per_split - 1) / per_split, per_split};
}
// Splits as one cluster of `size` blocks, a power of two; the last may have no keys.
constexpr SplitPlan plan_cluster(int32_t keys, int32_t size) {
  return {size, ((keys + size - 1) / size + kKeysPerStep - 1) / kKeysPerStep * kKeysPerStep, true};
}
// Where clusters of max_cluster blocks can be had (0: none). Their reduction is quicker, but they are 16 at
// most: not for sequences so long that more blocks count for more.
constexpr SplitPlan plan_decode(int32_t keys, int32_t tiles, int32_t sm_count, int32_t max_cluster) {
  const SplitPlan plan = plan_splits(keys, tiles, sm_count);
  int32_t size = keys > 2048 && max_cluster > 8 ? 16 : max_cluster < 8 ? 0 : 8;
  while (size > 1 && size * tiles > sm_count) size /= 2;
  if (plan.splits == 1 || size < 2) return plan;
  const SplitPlan cluster = plan_cluster(keys, size);
  return cluster.keys_per_split <= 1024 ? cluster : plan;
}
// Splits of all tiles never exceed this, whatever the length.
constexpr int64_t max_partials(int32_t tiles, int32_t sm_count) {
  return tiles > sm_count ? tiles : sm_count;
}

}  // namespace millrace::cuda::resident
