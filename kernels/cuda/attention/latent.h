// Latent attention (DeepSeek V2), absorbed: one key a token, [rope + rank], that all query heads share and
// whose last `rank` dimensions are the value too. The pieces around its products, the append and the
// attention itself. Pointers are device memory; launches are asynchronous on the stream, take counts of zero
// and throw Error{kDevice} when refused. B = 4.3 TB/s, the measured copy of an H200.
#pragma once

#include "kernels/cuda/attention/attention.h"

namespace millrace::cuda {

// Rows that kv_a made, [rows, rank + rope], become keys [rows, rope + rank]: the rotated dimensions first and
// as they are, behind them the latent, RMS normed. Floor: 8 (rank + rope) rows / B.
struct LatentKeys {
  const float* compressed = nullptr;
  const float* norm_weight = nullptr;  // [rank], or null: no norm
  float eps = 0.0f;
  int64_t rows = 0;
  int32_t rope = 0, rank = 0;
  float* key = nullptr;
};
void launch_latent_keys(const LatentKeys& op, const Launch& at);

// The rotated dimensions of heads q [rows, heads, nope + rope] to the begin of query [rows, heads, rope +
// rank].
void launch_latent_rope_queries(const float* q, int64_t rows, int32_t heads, int32_t nope, int32_t rope,
                                int32_t rank, float* query, const Launch& at);

// A latent pool is [blocks][layers][16][rope + rank] of the cache's type, the dimensions of a place in the
// cache's order; of kF8E4M3 [16] scales, then [16][rope + rank] codes. LayerCache: kv_heads is 1, head_dim
// rope + rank. Rotates query and key in place, as launch_rope_append_kv does, and stores the key.
void launch_latent_append(const LayerCache& cache, const RopeParams& op, const float2* angles, int64_t rows,
                          float* query, float* key, const Launch& at);

struct LatentAttention {
  LayerCache cache;
  float scale = 1.0f;
  int32_t rope = 0, rank = 0;
  int32_t rows = 0;
  int32_t max_splits = 1;        // of kSplitKeys positions, of any row
  const float* query = nullptr;  // [rows, heads, rope + rank], rotated
  float* out = nullptr;          // [rows, heads, rope + rank], of which the last `rank` are written
  // The kernel on warpgroup products: pieces of latent_chunk_tokens() tokens at most of one sequence,
  // [num_chunks][first row, rows, position of the first, sequence], those that see the most first; null:
  // every row is a sequence of its own.
  const int32_t* chunks = nullptr;
  int32_t num_chunks = 0;
  // latent_partial_bytes(), or null: a CTA has all splits of its rows, one after the other. The same bits.
  float* partial = nullptr;
};
// Caches of bf16 (CacheOrder::kSwizzled) and fp8 with heads of 64 + 512 or 64 + 256 dimensions, on Hopper.
bool supports_latent_wgmma(DType kv_type, int32_t rope, int32_t rank, const Device& device);
size_t latent_partial_bytes(int64_t rows, int32_t heads, int32_t max_splits, int32_t rank);
void launch_latent_wgmma(const LatentAttention& op, const Launch& at);  // latent_wgmma.cu
// Every type and size, in CacheOrder::kRows (or bf16 in either order). Chunks and partial are not looked at.
void launch_latent_generic(const LatentAttention& op, const Launch& at);  // latent.cu

}  // namespace millrace::cuda
