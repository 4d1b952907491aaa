/* Rows of numbers, as the fused operations take and give them (norms, rotary, activations, softmax,
 * cross-entropy, embedding, dropout; docs/kernels/fused.md).
 *
 * Every one of these operations reads and writes F32, F16 and BF16, each array in its own type, and computes
 * in float32. A result is rounded once, to nearest even. Rows do not depend on one another, a result has the
 * same bits every time, and sums over rows (gradients of weights) are taken over fixed blocks of rows in a
 * fixed order. Outputs do not overlap inputs unless a comment says that they may be the same array. */
#ifndef MILLRACE_KERNELS_ROWS_H
#define MILLRACE_KERNELS_ROWS_H

#include "millrace/kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* [rows, cols] of MR_F32, MR_F16 or MR_BF16, rows `stride` elements apart (0: cols). Inputs are only read.
 * data NULL: there is none, where a comment allows it. A GPU is fastest with data and strides of whole 16
 * bytes. */
typedef struct mr_rows {
  void* data;
  mr_dtype type;
  int64_t stride;
} mr_rows;

/* A vector [cols] of MR_F32, MR_F16 or MR_BF16. data NULL: there is none. */
typedef struct mr_vector {
  void* data;
  mr_dtype type;
} mr_vector;

#ifdef __cplusplus
}
#endif
#endif
