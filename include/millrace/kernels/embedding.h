/* Rows of a table by token, and the gradient of the table. */
#ifndef MILLRACE_KERNELS_EMBEDDING_H
#define MILLRACE_KERNELS_EMBEDDING_H

#include "millrace/kernels/device.h"
#include "millrace/kernels/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y[t, :] = scale * table[tokens[t], :]. A token outside [0, vocab) is refused on a CPU and gives a row of
 * NaN on a GPU. */
typedef struct mr_embedding_args {
  int64_t rows, cols, vocab; /* rows: tokens */
  const int32_t* tokens;     /* [rows] */
  mr_rows table;             /* [vocab, cols] */
  mr_rows y;                 /* [rows, cols] */
  float scale;
} mr_embedding_args;

MR_API mr_status mr_embedding(mr_device* device, const mr_embedding_args* args, mr_stream stream);

/* dtable[v, :] = scale * sum of dy[t, :] over the t with tokens[t] == v, in order of t; rows of tokens that
 * do not come are zero. accumulate: dtable += that. Tokens outside [0, vocab) are refused on a CPU and left
 * out on a GPU. */
typedef struct mr_embedding_backward_args {
  int64_t rows, cols, vocab;
  const int32_t* tokens;
  mr_rows dy;
  mr_rows dtable;
  float scale;
  int32_t accumulate;
} mr_embedding_backward_args;

MR_API mr_status mr_embedding_backward_workspace_bytes(const mr_device* device,
                                                       const mr_embedding_backward_args* args, size_t* bytes);
MR_API mr_status mr_embedding_backward(mr_device* device, const mr_embedding_backward_args* args,
                                       void* workspace, size_t workspace_bytes, mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
