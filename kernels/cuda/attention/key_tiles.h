// How attention on the tensor cores cuts its work, for the host: no CUDA in here. The cuts lie at multiples
// of absolute positions, so that every kernel makes the same ones (paged_tile.cuh has the numerics).
#pragma once

#include <cstdint>

namespace millrace::cuda {

inline constexpr int kKeyTile = 128;   // positions that share a row_max
inline constexpr int kSplitTiles = 4;  // tiles of one online softmax
inline constexpr int kSplitKeys = kKeyTile * kSplitTiles;
inline constexpr int kMaxHeadGroup = 8;  // query heads of a KV head

// Rows of the prefill kernel's products, of a CTA: 64 per consumer warpgroup. A row is one head of one token.
inline constexpr int prefill_rows(int32_t head_dim) { return head_dim == 64 ? 3 * 64 : 2 * 64; }

// Tokens of one sequence that a CTA of the prefill kernel takes at most.
inline constexpr int32_t prefill_chunk_tokens(int32_t heads, int32_t kv_heads, int32_t head_dim) {
  return heads > 0 && kv_heads > 0 ? prefill_rows(head_dim) / (heads / kv_heads) : 0;
}

// The same of latent attention, whose rows are heads of one key (latent.h): rows of a CTA's products, and
// tokens.
inline constexpr int kLatentRows = 64;
inline constexpr int32_t latent_chunk_tokens(int32_t heads) {
  return heads >= kLatentRows ? 1 : kLatentRows / (heads > 0 ? heads : 1);
}

// At most so many KV splits hold what a row at `position` or before it sees.
inline constexpr int32_t attention_splits(int32_t position, int32_t window) {
  const int32_t all = position / kSplitKeys + 1, seen = (window + kSplitKeys - 2) / kSplitKeys + 1;
  return window > 0 && seen < all ? seen : all;
}

}  // namespace millrace::cuda
