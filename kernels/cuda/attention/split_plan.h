// Where the KV splits of single rows are computed: on CTAs of their own, or one after the other in one CTA.
// The bits are the same either way.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/attention/key_tiles.h"
#include "kernels/cuda/device.h"

namespace millrace::cuda {

// Bytes of `partial` that are worth having: enough for 32 rows of 64 splits and 8 KV heads.
inline constexpr size_t kMaxPartialBytes = size_t{36} << 20;

inline size_t partial_bytes_for(int64_t max_rows, int32_t max_context, int32_t kv_heads, int32_t head_dim) {
  const auto splits = static_cast<uint32_t>(attention_splits(max_context, 0));
  return std::min(kMaxPartialBytes,
                  paged_attention_partial_bytes(max_rows, static_cast<int32_t>(std::bit_ceil(splits)),
                                                kv_heads, head_dim));
}

// Splits of any row, a power of two so that one graph serves many positions.
inline int32_t max_splits_for(int32_t last_position, int32_t window) {
  const auto splits = static_cast<uint32_t>(attention_splits(std::max(0, last_position), window));
  return static_cast<int32_t>(std::bit_ceil(splits));
}

// On CTAs of their own where a small batch would leave SMs idle, or make others wait for a long row; else a
// row's splits follow one another in one CTA, which saves their way through memory, as they do where a window
// leaves two of them. partial_bytes: what there is.
inline bool splits_in_parallel(int64_t rows, int32_t kv_heads, int32_t head_dim, int32_t max_splits,
                               int32_t window, size_t partial_bytes, const Device& device) {
  constexpr int32_t kMaxSplitsInTurn = 8;  // of one CTA: 4,096 positions
  const bool enough_rows = rows * kv_heads * 4 >= int64_t{device.sm_count()} * 5;
  const bool in_turn = (enough_rows && max_splits <= kMaxSplitsInTurn) || (window > 0 && max_splits <= 2);
  return max_splits > 1 && !in_turn &&
         paged_attention_partial_bytes(rows, max_splits, kv_heads, head_dim) <= partial_bytes;
}

// Rows of a step from which on they share keys and values (the prefill kernel).
inline constexpr int64_t kMinPrefillRows = 16;

}  // namespace millrace::cuda
