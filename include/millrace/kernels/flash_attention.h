/* Attention over tensors, forward and backward: dense, ragged or paged, every mask, sinks, block-sparse.
 * (attention.h is the engine's own paged cache: it plans a ragged batch once and appends as it goes.)
 *
 *     s[i, j]  = scale * q[i, h, :] . k[j, h / group, :]            group = heads / kv_heads
 *     s[i, j]  = softcap * tanh(s[i, j] / softcap)                  where softcap > 0
 *     p[i, j]  = exp(s[i, j] - lse[i, h])                           0 where the mask hides j from i
 *     lse[i,h] = log(sum_j exp(s[i, j]) + exp(sinks[h]))            the sink only where there is one
 *     out[i]   = sum_j p[i, j] v[j, h / group, :]
 *
 * Scores, sums and lse are float32 whatever the type. A row that sees no key has out = 0 and lse = -infinity
 * (or the sink, where there is one). Results of a row do not depend on other rows of the call.
 *
 * Positions. Queries stand at the end of the keys: query i of a sequence of q_len queries and k_len keys
 * stands at key position i + k_len - q_len, so causal means j <= i + k_len - q_len (bottom right aligned).
 * A window shows j in [position - window_left, position + window_right]; a negative side is open. Causal is
 * window_right = 0. */
#ifndef MILLRACE_KERNELS_FLASH_ATTENTION_H
#define MILLRACE_KERNELS_FLASH_ATTENTION_H

#include "millrace/kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* [batch, seq, heads, dim] by strides, in elements; dim is contiguous. [batch, heads, seq, dim] is the same
 * with other strides. Ragged: batch_stride is ignored, rows of all sequences follow one another. Data and
 * rows are aligned to 16 bytes: a stride, where there is more than one to step over, is at least dim and a
 * multiple of 16 bytes, and the rows of an output do not overlap. data may be NULL where there are no rows.
 */
typedef struct mr_flash_tensor {
  void* data;
  int64_t batch_stride, seq_stride, head_stride;
} mr_flash_tensor;

/* A list of key blocks for every block of queries, CSR style. Block (b, h, m) holds queries
 * [m * block_q, (m + 1) * block_q) of sequence b and head h; its key blocks are columns[row_starts[n]] to
 * columns[row_starts[n + 1] - 1] with n = (b * heads + h) * q_blocks + m, ascending, each once; the mask of
 * positions applies within them. Device memory. */
typedef struct mr_flash_blocks {
  int32_t block_q, block_k;  /* 64 or 128 */
  int32_t q_blocks;          /* ceil(max_q / block_q) */
  const int32_t* row_starts; /* [batch * heads * q_blocks + 1] */
  const int32_t* columns;
} mr_flash_blocks;

typedef struct mr_flash_problem {
  mr_dtype type; /* of q, k, v, out: MR_BF16, MR_F16, MR_F32; MR_F8_E4M3: q, k, v, with out in BF16, forward
                    only */
  int32_t batch, heads, kv_heads;
  int32_t head_dim, value_dim; /* of q and k; of v and out. Multiples of 8, at most 256 */
  int32_t max_q, max_k;        /* the length of every sequence, or, ragged, of the longest */

  /* Ragged: sequence b owns rows [cu_q[b], cu_q[b + 1]) of q and out and [cu_k[b], cu_k[b + 1]) of k and v.
   * [batch + 1] device memory, from 0. Both, or both NULL: every sequence has max_q and max_k. */
  const int32_t* cu_q;
  const int32_t* cu_k;
  /* Paged keys: position j of sequence b lies in page pages[b * pages_stride + j / page_tokens], at row
   * j % page_tokens; k and v are then [page, page_tokens, kv_heads, dim] with batch_stride from one page to
   * the next, and k_lengths [batch] says how many keys each has (cu_k is ignored, cu_q is not: queries may
   * be ragged or dense). Forward only. NULL: not paged. */
  const int32_t* pages;
  int64_t pages_stride;
  int32_t page_tokens; /* a multiple of 16 */
  const int32_t* k_lengths;

  float scale;                       /* 0: 1 / sqrt(head_dim) */
  float softcap;                     /* 0: none */
  int32_t window_left, window_right; /* negative: open. Causal: -1, 0 */
  const float* sinks;                /* [heads], or NULL */
  const mr_flash_blocks* blocks;     /* host struct, or NULL: every block */

  /* MR_F8_E4M3 only. What codes are multiplied by, float32 and positive: a scale per row of q,
   * [batch or 1][seq][heads] as q's rows lie, and per block of 128 absolute positions of k and v,
   * [batch][kv_heads][ceil(max_k / 128)]. On FP8 tensor cores (sm_90a, head sizes up to 128, not
   * block-sparse) probabilities are rounded to E4M3 too, which is 3e-2 of out; elsewhere they are not. */
  const float* q_scales;
  const float* k_scales;
  const float* v_scales;
} mr_flash_problem;

/* Forward. lse: float32 [batch, heads, max_q], ragged [heads, cu_q[batch]]; NULL: not wanted. The workspace
 * is asked for with the problem alone: the device's arrays are not read. On a CPU the lists (cu_q, pages,
 * columns ...) are checked too, before anything is computed. */
MR_API mr_status mr_flash_forward_workspace_bytes(const mr_device* device, const mr_flash_problem* problem,
                                                  size_t* bytes);
MR_API mr_status mr_flash_forward(mr_device* device, const mr_flash_problem* problem, mr_flash_tensor q,
                                  mr_flash_tensor k, mr_flash_tensor v, mr_flash_tensor out, float* lse,
                                  void* workspace, size_t workspace_bytes, mr_stream stream);

/* Backward: q, k, v, out and lse as forward had and gave them, d_out the gradient of out. d_q, d_k, d_v in
 * the problem's type (MR_BF16, MR_F16, MR_F32); d_sinks float32 [heads], NULL where it is not
 * wanted or there are no sinks. All are written, not added to.
 * deterministic 1: bit-equal from run to run: every sum in a fixed order or, of dQ with lists of blocks on
 * Hopper, in fixed point, where the order is of no matter. 0: dQ by atomic additions, faster.
 * The workspace is of the order of the tensors, never of scores. */
typedef struct mr_flash_gradients {
  mr_flash_tensor d_out;         /* in */
  mr_flash_tensor d_q, d_k, d_v; /* out */
  float* d_sinks;                /* out, or NULL */
  int32_t deterministic;
} mr_flash_gradients;

MR_API mr_status mr_flash_backward_workspace_bytes(const mr_device* device, const mr_flash_problem* problem,
                                                   int32_t deterministic, size_t* bytes);
MR_API mr_status mr_flash_backward(mr_device* device, const mr_flash_problem* problem, mr_flash_tensor q,
                                   mr_flash_tensor k, mr_flash_tensor v, mr_flash_tensor out,
                                   const float* lse, const mr_flash_gradients* gradients, void* workspace,
                                   size_t workspace_bytes, mr_stream stream);

/* q, k, v [rows, dim] of `type` -> codes and scales of MR_F8_E4M3 as above, with (rotate 1) or without a
 * Hadamard rotation of each row of q and k by the same orthogonal matrix: scores stay, outliers spread. The
 * matrix is H / sqrt(n) in Sylvester's order for every n neighbours, n the largest power of two that divides
 * dim. A scale is the largest magnitude / 448, and 1 where all are zero. */
typedef struct mr_flash_quantize_args {
  mr_dtype type; /* of x: MR_BF16 or MR_F16 */
  int32_t batch, seq, heads, dim;
  mr_flash_tensor x;     /* in */
  mr_flash_tensor codes; /* out, one byte an element */
  float* scales; /* out: [batch][seq][heads], or with rows_per_scale 128 [batch][heads][ceil(seq / 128)] */
  int32_t rows_per_scale; /* 1 for q, 128 for k and v */
  int32_t rotate;
} mr_flash_quantize_args;
MR_API mr_status mr_flash_quantize(mr_device* device, const mr_flash_quantize_args* args, mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
