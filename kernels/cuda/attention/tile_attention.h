// Attention on warp products for what the paged kernels (attention.h) do not have: heads of 256, soft caps,
// chunks, both directions, many query heads of a KV head. Caches of bf16 in either order. Pointers are device
// memory; launches are asynchronous on the stream.
#pragma once

#include "kernels/cuda/attention/attention.h"

namespace millrace::cuda {

struct TileAttention {
  LayerCache cache;
  AttentionParams op;
  AttentionLimits limits;
  int32_t rows = 0;
  bool single_tokens = false;    // every row is a sequence of its own
  int32_t max_splits = 1;        // of kSplitKeys positions, of any row
  const float* query = nullptr;  // [rows, heads, dim], rotated
  float* out = nullptr;          // [rows, heads, dim]
  // tile_attention_partial_bytes(), or null: a CTA has all splits of a row. Where every row is a sequence of
  // its own; the bits are the same.
  float* partial = nullptr;
};
bool supports_tile_attention(DType kv_type, int32_t heads, int32_t kv_heads, int32_t head_dim,
                             const Device& device);
size_t tile_attention_partial_bytes(int64_t rows, int32_t heads, int32_t max_splits, int32_t head_dim);
void launch_tile_attention(const TileAttention& op, const Launch& at);

}  // namespace millrace::cuda
