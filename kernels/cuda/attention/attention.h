// Paged attention, and the rotation and the append before it. Parameters are plain structs; pointers are
// device memory unless they say otherwise. Launches are asynchronous on the stream, take counts of zero, and
// throw Error{kDevice} when refused. B = 4.3 TB/s, the measured copy of an H200: a floor is what a kernel
// could reach.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/attention/key_tiles.h"
#include "kernels/cuda/device.h"
#include "tensor/dtype.h"

namespace millrace::cuda {

// How keys and values lie in a block. kSwizzled: [head_dim / 64][16] rows of 64 elements, their eighths
// exchanged by eighth ^ (position % 8): a plain copy of a block is an operand of the tensor cores
// (ptx/wgmma.cuh).
enum class CacheOrder : int32_t { kRows, kSwizzled };

// One layer's keys and values in a group's pool, and where each row of the batch finds them.
// Pool: [blocks][layers][key, value][kv_heads][16][head_dim] of `type`; for kF8E4M3 as kv_fp8.cuh says, a
// byte being an element.
struct LayerCache {
  void* pool = nullptr;
  DType type = DType::kF32;               // kF32, kF16, kBF16, kF8E4M3
  int64_t block_elements = 0;             // of one block, all layers
  int64_t layer_offset = 0;               // elements before this layer's keys in a block
  const int32_t* positions = nullptr;     // [rows]
  const int32_t* sequence_of = nullptr;   // [rows]
  const int32_t* table_starts = nullptr;  // [sequences]: where a sequence's table begins in `tables`
  const int32_t* tables = nullptr;        // [.. logical blocks] -> pool block
  int32_t heads = 0, kv_heads = 0, head_dim = 0;
  CacheOrder order = CacheOrder::kRows;
  // [rows, kv_heads], or null: for rows that are sequences of their own, a table for each KV head, made by a
  // kernel of the same step as `positions` is then (sparse.h). sequence_of and the tables above are not read.
  const int32_t* const* head_tables = nullptr;
};

// Rotates query [rows, heads, dim] and key [rows, kv_heads, dim] in place, then stores key and value in the
// cache. angles: [rows, half] from launch_angles. Floor: (8 (heads + kv_heads) + kv_heads (4 + 2 sizeof
// type)) dim * rows / B.
struct RopeParams {
  const float* inv_freq = nullptr;  // [half]
  int32_t half = 0;                 // rotary dims / 2
  float magnitude = 1.0f;
  bool interleaved = false;
};
void launch_rope_append_kv(const LayerCache& cache, const RopeParams& op, const float2* angles, int64_t rows,
                           float* query, float* key, const float* value, const Launch& at);

// out[row, head, :] = softmax(scale q.k) v over the positions the row may see. One CTA per (row, head) reads
// the context alone: a long context with few rows leaves most of the chip idle. Floor: kv_heads * dim * 2 *
// sizeof type
// * context / B per sequence; each query head of a group reads it again (from L2).
struct AttentionParams {
  int32_t window = 0;  // 0: everything
  float scale = 1.0f;
  const float* sinks = nullptr;  // [heads] or null
};
// What few models have, and this kernel alone. softcap: scores become softcap * tanh(score / softcap), 0:
// they stay. chunk: a row sees its chunk of the context, [chunk * i, chunk * (i + 1)), up to itself, 0: no
// chunks. lengths [sequences], or null: a row also sees what is behind it, window - 1 positions or all, in a
// sequence of so many; with both_ways all of them, whatever the window (images).
struct AttentionLimits {
  float softcap = 0.0f;
  int32_t chunk = 0;
  const int32_t* lengths = nullptr;
  bool both_ways = false;
};
// Keys and values in either order.
void launch_attention(const LayerCache& cache, const AttentionParams& op, int64_t rows, const float* query,
                      float* out, const Launch& at, const AttentionLimits& limits = {});
// query [rows, cols] *= 1 + scale * log(1 + floor((position + offset) / every)), in double.
struct QueryGrowth {
  float scale = 0.0f, every = 1.0f;
  int32_t offset = 0;
};
void launch_grow_queries(const QueryGrowth& op, const int32_t* positions, int64_t rows, int64_t cols,
                         float* query, const Launch& at);

// The same on the tensor cores for bf16 and fp8 caches in CacheOrder::kSwizzled, head_dim 64 or 128 and at
// most 8 query heads per KV head. With `angles` it also rotates query and key and stores key and value, which
// is right when every sequence has one new token only (nobody attends to what another row stores in the same
// launch). With `chunks` (and without `angles`) the prefill kernel does it: the same bits.
struct PagedAttention {
  LayerCache cache;
  AttentionParams op;
  int32_t rows = 0;
  int32_t max_splits = 1;  // KV splits of any row, see attention_splits
  // [rows, dim / 2]: cos and sin, or null: query is rotated, key and value stored
  const float2* angles = nullptr;
  bool interleaved = false;                                        // pairs that rotate
  const float *query = nullptr, *key = nullptr, *value = nullptr;  // [rows, .., dim]
  float* out = nullptr;                                            // [rows, heads, dim]
  float* partial = nullptr;    // paged_attention_partial_bytes(), or null: one CTA has all splits of a row
  int32_t* arrived = nullptr;  // [rows, kv_heads], zero before and after
  // [num_chunks][first row, rows, position of the first, sequence], 16-byte aligned: rows of one sequence, at
  // most prefill_chunk_tokens(), those that see the most first.
  const int32_t* chunks = nullptr;
  int32_t num_chunks = 0;
};
bool supports_paged_attention(DType kv_type, int32_t heads, int32_t kv_heads, int32_t head_dim,
                              const Device& device);
size_t paged_attention_partial_bytes(int64_t rows, int32_t max_splits, int32_t kv_heads, int32_t head_dim);
// Prefill with chunks, else decode.
void launch_paged_attention(const PagedAttention& op, const Launch& at);
void launch_prefill_attention(const PagedAttention& op, const Launch& at);  // prefill_wgmma.cu
void launch_decode_attention(const PagedAttention& op, const Launch& at);   // decode.cu, decode_split_kv.cu

// cos and sin of every row's angles, times magnitude: [rows, half].
void launch_angles(const int32_t* positions, int64_t rows, const RopeParams& op, float2* angles,
                   const Launch& at);
// The same with three positions of each row, [rows, 3]: angle i is turned by number axes[i], of [half] or
// null: the first.
void launch_angles_on_axes(const int32_t* positions, const uint8_t* axes, int64_t rows, const RopeParams& op,
                           float2* angles, const Launch& at);

// Rotates x [rows, heads, head_dim], rows row_stride elements apart, in place by positions[row].
void launch_rotary(const RopeParams& op, const int32_t* positions, int64_t rows, int32_t heads,
                   int32_t head_dim, float* x, int64_t row_stride, const Launch& at);

}  // namespace millrace::cuda
