/* Attention in parts, for keys that are spread over devices or processes: what a span of keys gives, how two
 * spans are merged, and how the whole is finished. Forward and backward, with the bits of mr_flash_forward
 * and mr_flash_backward on one device, whoever computed a part and in whatever order parts arrived.
 *
 * Chunks. Positions are cut into chunks of MR_FLASH_CHUNK, by absolute position. Within a chunk a row goes
 * through the keys in order. Chunks are merged in a binary tree over their numbers: a node is the chunks [i
 * 2^l, (i + 1) 2^l), and is its lower half merged with its upper half; halves of which a row sees nothing are
 * left out, which changes no bit. A span that is one node (or a node cut off by the end of the sequence, or
 * by what the mask shows) is therefore one partial, and any span is a few. dQ is summed so over chunks of
 * keys, dK and dV over chunks of queries.
 *
 *     partial   = mr_flash_partial_forward(queries, keys of one node)          anywhere
 *     partial   = mr_flash_merge(lower half, upper half) ...                   up to the root, in any order
 * of arrival out, lse  = mr_flash_finish(root, sinks)                                 once
 *
 * On a CPU; a GPU refuses with MR_ERROR_UNSUPPORTED. */
#ifndef MILLRACE_KERNELS_FLASH_PARTIAL_H
#define MILLRACE_KERNELS_FLASH_PARTIAL_H

#include "millrace/kernels/flash_attention.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MR_FLASH_CHUNK 256

/* Where the sequences of a problem stand: query i of sequence b at position q_first[b] + i, key j at
 * k_first[b] + j. [batch] each, host memory, 0 or more; k_first in multiples of MR_FLASH_CHUNK, backward
 * q_first too. */
typedef struct mr_flash_span {
  const int32_t* q_first;
  const int32_t* k_first;
} mr_flash_span;

/* Forward over a span of keys. out is float32 whatever the problem's type, with strides; lse as in
 * mr_flash_forward, and not NULL. A row that sees no key of the span has out = 0, lse = -infinity.
 * problem.sinks and problem.blocks are NULL: a sink is merged once, by mr_flash_finish. The workspace is
 * mr_flash_forward's. */
MR_API mr_status mr_flash_partial_forward(mr_device* device, const mr_flash_problem* problem,
                                          const mr_flash_span* span, mr_flash_tensor q, mr_flash_tensor k,
                                          mr_flash_tensor v, mr_flash_tensor out, float* lse, void* workspace,
                                          size_t workspace_bytes, mr_stream stream);

/* Two partials [rows][heads][dim] with log-sum-exps [heads][rows], dense: the one of higher positions (other)
 * into the one of lower. lse and other_lse NULL: gradients, which are added. */
typedef struct mr_flash_merge_args {
  int64_t rows;
  int32_t heads, dim; /* dim: a multiple of 8, at most 256 */
  float* out;         /* in and out */
  float* lse;         /* in and out, or NULL */
  const float* other_out;
  const float* other_lse; /* NULL where lse is */
} mr_flash_merge_args;
MR_API mr_status mr_flash_merge(mr_device* device, const mr_flash_merge_args* args, mr_stream stream);

/* A partial to a tensor [rows, heads, dim] of `type` (MR_BF16, MR_F16, MR_F32) by seq_stride and head_stride,
 * with the sinks where there are any; also gradients (partial_lse, sinks and lse NULL). */
typedef struct mr_flash_finish_args {
  mr_dtype type; /* of out */
  int64_t rows;
  int32_t heads, dim;
  const float* partial;     /* [rows][heads][dim] */
  const float* partial_lse; /* [heads][rows], or NULL: gradients */
  const float* sinks;       /* [heads], or NULL; with partial_lse alone */
  mr_flash_tensor out;
  float* lse; /* [heads][rows], may be partial_lse; NULL: not wanted */
} mr_flash_finish_args;
MR_API mr_status mr_flash_finish(mr_device* device, const mr_flash_finish_args* args, mr_stream stream);

/* delta[row] = sum over dimensions of d_out * out, laid out as lse: what backward needs of a query beside q,
 * d_out and lse. The workspace is mr_flash_forward's. */
MR_API mr_status mr_flash_delta(mr_device* device, const mr_flash_problem* problem, mr_flash_tensor out,
                                mr_flash_tensor d_out, float* delta, void* workspace, size_t workspace_bytes,
                                mr_stream stream);

/* Backward of a span of queries and a span of keys. lse: of all keys and sinks, as mr_flash_finish gave it.
 * d_q is this span of keys' part, d_k and d_v this span of queries'; float32 all, to be added by
 * mr_flash_merge and rounded by mr_flash_finish. problem.sinks, problem.blocks and problem.pages are NULL.
 * The workspace is mr_flash_forward's. */
typedef struct mr_flash_partial_gradients {
  mr_flash_tensor d_out; /* in, of the problem's type */
  const float* lse;      /* in */
  const float* delta;    /* in: mr_flash_delta */
  mr_flash_tensor d_q, d_k, d_v;
} mr_flash_partial_gradients;
MR_API mr_status mr_flash_partial_backward(mr_device* device, const mr_flash_problem* problem,
                                           const mr_flash_span* span, mr_flash_tensor q, mr_flash_tensor k,
                                           mr_flash_tensor v, const mr_flash_partial_gradients* gradients,
                                           void* workspace, size_t workspace_bytes, mr_stream stream);

/* What `rows` rows of one chunk of queries and one head add to d_sinks: -sum of exp(sink - lse) * delta, in
 * double. d_sinks is their sum over sequences and chunks in order, from 0. Host memory. */
MR_API mr_status mr_flash_sink_gradient(float sink, const float* lse, const float* delta, int64_t rows,
                                        double* sum);

#ifdef __cplusplus
}
#endif
#endif
