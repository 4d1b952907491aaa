/* Paged attention over a ragged batch: prompts, chunks of prompts and single rows (decode) in one call.
 *
 * A batch is a flat list of rows (tokens). Sequence s owns rows [row_starts[s], row_starts[s + 1]) and has
 * context_lengths[s] tokens in the cache before them, so its rows stand at positions context_lengths[s],
 * context_lengths[s] + 1, ... A row sees every position up to its own, or the last `window` of them.
 *
 *     out[r, h, :] = sum_p softmax_p(scale * q[r, h, :] . k[p, h / group, :]) v[p, h / group, :]
 *
 * with group = heads / kv_heads; a sink joins the denominator: exp(sink[h]) and no value. Scores, sums and
 * outputs are float32. A row's bits do not depend on the other rows of the batch or on how its prompt was
 * cut.
 *
 * The cache is blocks of 16 tokens. A block of one layer holds, for every KV head, 16 keys and 16 values in
 * the device's own order; mr_kv_block_bytes says how many bytes. Blocks lie block_stride_bytes apart (at
 * least mr_kv_block_bytes), so the layers of a model may share a block of a larger pool. Table entry i of a
 * sequence is the block that holds its positions [16 i, 16 i + 16); entries behind a window are never read.
 *
 * Plan once per step, run once per layer:
 *     mr_attention_create -> { mr_attention_plan -> { mr_attention_append, mr_attention_run } per layer } ...
 */
#ifndef MILLRACE_KERNELS_ATTENTION_H
#define MILLRACE_KERNELS_ATTENTION_H

#include "millrace/kernels/device.h"
#include "millrace/kernels/rotary.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MR_KV_BLOCK_TOKENS = 16 };

typedef struct mr_attention_config {
  int32_t heads, kv_heads, head_dim; /* heads is a multiple of kv_heads */
  mr_dtype kv_type;                  /* MR_F32, MR_F16, MR_BF16, MR_F8_E4M3; MR_Q8_0 on a CPU */
  /* The largest batch that will be planned: what workspaces are sized by. */
  int32_t max_rows, max_sequences, max_context;
} mr_attention_config;

typedef struct mr_attention mr_attention;

MR_API mr_status mr_kv_block_bytes(const mr_device* device, const mr_attention_config* config, size_t* bytes);
MR_API mr_status mr_attention_workspace_bytes(const mr_device* device, const mr_attention_config* config,
                                              size_t* bytes);

/* `workspace` is the device's memory, 256-byte aligned, and stays the caller's. */
MR_API mr_status mr_attention_create(mr_device* device, const mr_attention_config* config, void* workspace,
                                     size_t workspace_bytes, mr_attention** attention);
MR_API void mr_attention_destroy(mr_attention* attention);

/* Host memory, all of it; read before the call returns. */
typedef struct mr_batch {
  int32_t num_sequences;
  const int32_t* row_starts;      /* [num_sequences + 1], from 0 */
  const int32_t* context_lengths; /* [num_sequences] */
  const int32_t* block_tables;    /* [num_sequences][table_stride] */
  int64_t table_stride;           /* entries from one sequence's table to the next's */
} mr_batch;

MR_API mr_status mr_attention_plan(mr_attention* attention, const mr_batch* batch, mr_stream stream);

/* One layer's keys and values. */
typedef struct mr_kv_cache {
  void* blocks; /* 256-byte aligned */
  int32_t num_blocks;
  int64_t block_stride_bytes; /* a multiple of 16; 0: mr_kv_block_bytes */
} mr_kv_cache;

/* Rotates query [rows, heads, head_dim] and key [rows, kv_heads, head_dim] in place (rotary NULL: neither),
 * and stores key and value [rows, kv_heads, head_dim] at their positions. Float32, contiguous. */
MR_API mr_status mr_attention_append(mr_attention* attention, const mr_kv_cache* cache,
                                     const mr_rotary* rotary, float* query, float* key, const float* value,
                                     mr_stream stream);

typedef struct mr_attention_args {
  int32_t window;     /* positions that a row sees, its own included; 0: all */
  float scale;        /* of the scores; 0: 1 / sqrt(head_dim) */
  const float* sinks; /* [heads], or NULL */
} mr_attention_args;

/* query, out: [rows, heads, head_dim] float32, contiguous, 16-byte aligned; they may not overlap. */
MR_API mr_status mr_attention_run(mr_attention* attention, const mr_kv_cache* cache,
                                  const mr_attention_args* args, const float* query, float* out,
                                  mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
