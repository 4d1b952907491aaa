/* From logits to tokens. The same logits and the same random number give the same token on every device, to
 * the bit and in any batch: weights are added as whole numbers of 2^-40 of the likeliest's. */
#ifndef MILLRACE_KERNELS_SAMPLE_H
#define MILLRACE_KERNELS_SAMPLE_H

#include "millrace/kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a row becomes in place of a token. */
enum { MR_TOKEN_NAN = -1, MR_TOKEN_NONE = -2 }; /* a logit is NaN; none is above -infinity */

typedef struct mr_sample_params {
  float
      temperature; /* below 1e-6: the likeliest, the lowest id among equals; else logits are divided by it */
  int32_t top_k;   /* keep the k likeliest; 0: all */
  float top_p;     /* keep the fewest likeliest whose probabilities reach this; 1: all */
  float min_p;     /* keep those at least this times as likely as the likeliest; 0: all */
  double uniform;  /* the random number of this draw, in [0, 1) */
} mr_sample_params;

MR_API mr_status mr_sample_workspace_bytes(const mr_device* device, int64_t rows, int64_t vocab,
                                           size_t* bytes);
/* logits [rows, vocab] float32, contiguous; params [rows] in HOST memory, read before the call returns;
 * tokens [rows] int32, device memory. */
MR_API mr_status mr_sample(mr_device* device, const float* logits, int64_t rows, int64_t vocab,
                           const mr_sample_params* params, int32_t* tokens, void* workspace,
                           size_t workspace_bytes, mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
