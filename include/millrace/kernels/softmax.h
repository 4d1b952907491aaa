/* Softmax of rows, and its gradient. */
#ifndef MILLRACE_KERNELS_SOFTMAX_H
#define MILLRACE_KERNELS_SOFTMAX_H

#include "millrace/kernels/device.h"
#include "millrace/kernels/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y = softmax(scale * x) of every row. -infinity is weight 0; a row of nothing else is NaN. */
typedef struct mr_softmax_args {
  int64_t rows, cols;
  mr_rows x, y; /* y may be x */
  float scale;
} mr_softmax_args;

MR_API mr_status mr_softmax(mr_device* device, const mr_softmax_args* args, mr_stream stream);

/* dx = scale * y * (dy - sum(dy * y)) */
typedef struct mr_softmax_backward_args {
  int64_t rows, cols;
  mr_rows y, dy, dx; /* y: what mr_softmax gave; dx may be dy or y */
  float scale;
} mr_softmax_backward_args;

MR_API mr_status mr_softmax_backward(mr_device* device, const mr_softmax_backward_args* args,
                                     mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
