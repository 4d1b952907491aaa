/* Cross-entropy of rows of logits against a class each, and its gradient; and the same of hidden states times
 * a weight, chunk by chunk, where the logits of all rows would not fit. */
#ifndef MILLRACE_KERNELS_CROSS_ENTROPY_H
#define MILLRACE_KERNELS_CROSS_ENTROPY_H

#include "millrace/kernels/device.h"
#include "millrace/kernels/matmul.h"
#include "millrace/kernels/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

/* loss[r] = lse[r] - logits[r, targets[r]], lse the log-sum-exp of the row. A target equal to ignore_index
 * has loss 0; any other outside [0, vocab) is refused on a CPU and has loss NaN on a GPU. */
typedef struct mr_cross_entropy_args {
  int64_t rows, vocab;
  mr_rows logits;         /* [rows, vocab] */
  const int32_t* targets; /* [rows] */
  int32_t ignore_index;   /* e.g. -100 */
  float* loss;            /* [rows] */
  float* lse;             /* [rows] */
} mr_cross_entropy_args;

MR_API mr_status mr_cross_entropy(mr_device* device, const mr_cross_entropy_args* args, mr_stream stream);

/* dlogits[r, v] = dloss[r] * (exp(logits[r, v] - lse[r]) - (v == targets[r])); a row of zeros where the
 * target is ignore_index. */
typedef struct mr_cross_entropy_backward_args {
  int64_t rows, vocab;
  mr_rows logits;
  const int32_t* targets;
  int32_t ignore_index;
  const float* lse;   /* [rows], of mr_cross_entropy */
  const float* dloss; /* [rows] */
  mr_rows dlogits;    /* may be logits */
} mr_cross_entropy_backward_args;

MR_API mr_status mr_cross_entropy_backward(mr_device* device, const mr_cross_entropy_backward_args* args,
                                           mr_stream stream);

/* The same of logits = hidden W^T, which are never there at once: as many rows of them at a time as the
 * workspace has room for. */
typedef struct mr_linear_cross_entropy_args {
  const mr_weight* weight; /* [vocab, in] */
  const float* hidden;     /* [rows, in] float32, rows hidden_stride elements apart (0: in) */
  int64_t hidden_stride;
  int64_t rows;
  const int32_t* targets; /* [rows] */
  int32_t ignore_index;
  float* loss; /* [rows] */
  float* lse;  /* [rows] */
} mr_linear_cross_entropy_args;

/* For `chunk` rows at a time, 1 to rows: the more, the better the product. */
MR_API mr_status mr_linear_cross_entropy_workspace_bytes(const mr_device* device, const mr_weight* weight,
                                                         int64_t chunk, size_t* bytes);
/* Takes as many rows at a time as the workspace holds, at least one. */
MR_API mr_status mr_linear_cross_entropy(mr_device* device, const mr_linear_cross_entropy_args* args,
                                         void* workspace, size_t workspace_bytes, mr_stream stream);

#define MR_CROSS_ENTROPY_BLOCK 256 /* rows and classes whose sums are taken apart and then added in order */

/* Its gradients for plain matrices, with no logits kept: they are computed again, a chunk of classes and rows
 * at a time, with dlogits[r, v] = dloss[r] * (exp(hidden[r] W[v] - lse[r]) - (v == targets[r])), 0 in rows
 * whose target is ignore_index:
 *     dhidden = dlogits W        dweight = dlogits^T hidden
 * dlogits and sums are float32, whatever the arrays are, and a result is rounded once. Its bits do not depend
 * on the chunks. (A GPU multiplies dlogits, and weights and hidden states of float32, to 22 bits of mantissa.
 * There a target outside [0, vocab) that is not ignore_index is none of the classes; a CPU refuses it.) */
typedef struct mr_linear_cross_entropy_backward_args {
  int64_t rows, vocab, in;
  mr_rows hidden;         /* [rows, in] */
  mr_rows weight;         /* [vocab, in] */
  const int32_t* targets; /* [rows] */
  int32_t ignore_index;
  const float* lse;   /* [rows], of mr_linear_cross_entropy */
  const float* dloss; /* [rows] */
  mr_rows dhidden;    /* [rows, in], or none */
  mr_rows dweight;    /* [vocab, in], or none */
  int32_t accumulate; /* 1: dweight += */
  /* Logits that are there at once, each rounded up to whole blocks of MR_CROSS_ENTROPY_BLOCK; 0: 1024 and
   * 4096. */
  int64_t chunk_rows, chunk_vocab;
} mr_linear_cross_entropy_backward_args;

MR_API mr_status mr_linear_cross_entropy_backward_workspace_bytes(
    const mr_device* device, const mr_linear_cross_entropy_backward_args* args, size_t* bytes);
MR_API mr_status mr_linear_cross_entropy_backward(mr_device* device,
                                                  const mr_linear_cross_entropy_backward_args* args,
                                                  void* workspace, size_t workspace_bytes, mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
