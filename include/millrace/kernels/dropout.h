/* Dropout by a counter-based generator: which elements are dropped follows from seed, offset, row and column
 * alone, so that nothing is kept for the backward pass, and every device drops the same.
 *
 * The generator is Philox 4x32-10 (Salmon et al., 2011). Key: the seed's low and high 32 bits. Counter:
 * column / 4, row, the offset's low and high 32 bits. Element (row, column) takes word column % 4 of the
 * four, and is kept where that is not below floor(p * 2^32). */
#ifndef MILLRACE_KERNELS_DROPOUT_H
#define MILLRACE_KERNELS_DROPOUT_H

#include "millrace/kernels/device.h"
#include "millrace/kernels/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y = x / (1 - p) where kept, else 0. The gradient is the same function of dy. */
typedef struct mr_dropout_args {
  int64_t rows, cols;
  mr_rows x, y; /* y may be x */
  float p;      /* 0 <= p < 1 */
  uint64_t seed;
  uint64_t offset; /* another one for every layer and step */
} mr_dropout_args;

MR_API mr_status mr_dropout(mr_device* device, const mr_dropout_args* args, mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
