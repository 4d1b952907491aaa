// Every launcher of this backend, for the executor. Parameters are plain structs; pointers are device memory
// unless they say otherwise. All launches are asynchronous on `stream`, take counts of zero, and throw
// Error{kDevice} when refused.
//
// These kernels are the simple ones: each is right for every type and shape, and its reduction order depends
// on the shape of one row only, so that a row's bits do not depend on the batch. What bounds them, with B
// = 4.3 TB/s of an H200 (measured copy), is written beside each launcher: the floor is what a faster kernel
// could reach.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/attention/plan.h"
#include "tensor/dtype.h"

namespace millrace::cuda {

// A weight matrix in the file's own encoding, rows packed: [experts * rows][row_bytes].
struct DeviceMatrix {
  const uint8_t* data = nullptr;
  int64_t rows = 0;  // of one expert
  int64_t cols = 0;
  int64_t row_bytes = 0;
  DType type = DType::kF32;
  // Scales beside the values (kF8E4M3, kMXFP4Split), packed: [grid rows][scales_per_row]; null without.
  DType scale_type = DType::kU8;
  const uint8_t* scales = nullptr;
  int64_t rows_per_scale = 1;
  int64_t cols_per_scale = 32;
  int64_t scales_per_row = 0;
};

// Does this binary hold code that the current device can run?
bool has_code_for_device();
// The architecture of the code that runs on it, 90 for sm_90: of the PTX where the driver translates that.
int code_architecture();

// out[t, :] = table[tokens[t], :] * scale. Floor: (row_bytes + 4 hidden) * count / B.
void launch_embed(const DeviceMatrix& table, const int32_t* tokens, int64_t count, float scale, float* out,
                  cudaStream_t stream);

// y[i, :] = x[r, :] / sqrt(mean(x[r, :]^2) + eps) * weight, r = source_rows[i], or i when that is null.
// y may be x when source_rows is null. Floor: 8 size * rows / B.
void launch_rmsnorm(const float* x, const int32_t* source_rows, const float* weight, float eps, int64_t rows,
                    int64_t size, float* y, cudaStream_t stream);

// y[t, r] = sum_c w[r, c] x[t, c] + bias[r], added to y when `add`. x [count, cols], y [count, rows]; bias or
// null. Floor for few tokens: the weight's bytes / B. This kernel reads the weight once per 8 tokens (from L2
// where it fits), decodes it each time and multiplies without tensor cores: at most 67 TFLOP/s and far under
// that.
void launch_linear(const DeviceMatrix& w, const float* bias, const float* x, int64_t count, bool add,
                   float* y, cudaStream_t stream);

// The same for (token, slot) pairs, each with the expert of its own: y[p, r] from expert chosen[p] and
// x[p / pairs_per_x_row, :]. bias [experts, rows] or null. Floor: the chosen experts' bytes / B; a weight is
// read once per pair.
void launch_expert_linear(const DeviceMatrix& w, const float* bias, const float* x, int64_t pairs_per_x_row,
                          const int32_t* chosen, int64_t pairs, float* y, cudaStream_t stream);

// The k experts with the largest scores [count, experts] of each token, ties and NaN to the lower index, and
// their softmax weights over the chosen or over all. chosen, weights: [count, k]. Latency-bound: 4 experts
// bytes per token.
void launch_choose_experts(const float* scores, int64_t count, int experts, int k, bool softmax_over_all,
                           int32_t* chosen, float* weights, cudaStream_t stream);

// gate = silu(gate) * up, or gpt-oss's clamped form. Floor: 12 size / B.
struct Activation {
  bool clamped = false;
  float alpha = 1.702f, limit = 7.0f;
};
void launch_activate(const Activation& op, int64_t size, float* gate, const float* up, cudaStream_t stream);

// residual[t, :] += sum over slots, in order, of weights[t, s] * down[t * k + s, :]. Floor: 4 (k + 2) hidden
// count / B.
void launch_combine_experts(const float* down, const float* weights, int64_t count, int k, int64_t hidden,
                            float* residual, cudaStream_t stream);

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
                           float* query, float* key, const float* value, cudaStream_t stream);

// out[row, head, :] = softmax(scale q.k) v over the positions the row may see. One CTA per (row, head) walks
// the context alone: a long context with few rows leaves most of the chip idle. Floor: kv_heads * dim * 2 *
// sizeof type
// * context / B per sequence; each query head of a group reads it again (from L2).
struct AttentionParams {
  int32_t window = 0;  // 0: everything
  float scale = 1.0f;
  const float* sinks = nullptr;  // [heads] or null
};
// Keys and values as rows (CacheOrder::kRows).
void launch_attention(const LayerCache& cache, const AttentionParams& op, int64_t rows, const float* query,
                      float* out, cudaStream_t stream);

// The same on the tensor cores for bf16 and fp8 caches in CacheOrder::kSwizzled, head_dim 64 or 128 and at
// most 8 query heads per KV head. With `angles` it also rotates query and key and stores key and value, which
// is right when every sequence has one new token only (nobody attends to what another row stores in the same
// launch). With `chunks` (and without `angles`) the prompt kernel does it: the same bits.
struct PackedAttention {
  LayerCache cache;
  AttentionParams op;
  int32_t rows = 0;
  int32_t max_spans = 1;  // of any row, see attention_spans
  const float2* angles =
      nullptr;               // [rows, dim / 2]: cos and sin, or null: query is rotated, key and value stored
  bool interleaved = false;  // pairs that rotate
  const float *query = nullptr, *key = nullptr, *value = nullptr;  // [rows, .., dim]
  float* out = nullptr;                                            // [rows, heads, dim]
  float* partial = nullptr;    // packed_attention_partial_bytes(), or null: a row's spans follow one another
  int32_t* arrived = nullptr;  // [rows, kv_heads], zero before and after
  // [num_chunks][first row, rows, position of the first, sequence], 16-byte aligned: rows of one sequence, at
  // most prompt_chunk_tokens(), those that see the most first.
  const int32_t* chunks = nullptr;
  int32_t num_chunks = 0;
};
bool fits_packed_attention(DType kv_type, int32_t heads, int32_t kv_heads, int32_t head_dim);
size_t packed_attention_partial_bytes(int64_t rows, int32_t max_spans, int32_t kv_heads, int32_t head_dim);
void launch_packed_attention(const PackedAttention& op, cudaStream_t stream);
void launch_prompt_attention(const PackedAttention& op, cudaStream_t stream);

// cos and sin of every row's angles, times magnitude: [rows, half].
void launch_angles(const int32_t* positions, int64_t rows, const RopeParams& op, float2* angles,
                   cudaStream_t stream);

// best[r]: the index of the largest of logits[r, :], the lowest among equals; -1 when one of them is NaN, -2
// when none is above -infinity.
// Floor: 4 vocab * rows / B. `candidates`: argmax_candidates_bytes().
void launch_argmax(const float* logits, int64_t rows, int64_t vocab, void* candidates, int32_t* best,
                   cudaStream_t stream);
size_t argmax_candidates_bytes(int64_t rows);

// Adds to *count how many of `words` words differ: for comparing what two kernels wrote.
void launch_count_differences(const void* a, const void* b, int64_t words, uint64_t* count,
                              cudaStream_t stream);

}  // namespace millrace::cuda
