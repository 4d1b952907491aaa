/* Rotary position embedding. Scalings (llama3, YaRN, linear) are a choice of inv_freq and magnitude. */
#ifndef MILLRACE_KERNELS_ROTARY_H
#define MILLRACE_KERNELS_ROTARY_H

#include "millrace/kernels/device.h"
#include "millrace/kernels/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mr_rotary {
  const float* inv_freq; /* [num_freqs], device memory: angle per position of each pair */
  int32_t num_freqs;     /* rotary dimensions / 2; what lies behind them in a head is left as it is */
  float magnitude;       /* multiplies cosine and sine (YaRN); 1 without */
  int32_t interleaved;   /* 0: pairs (i, i + num_freqs). 1: pairs (2 i, 2 i + 1) */
} mr_rotary;

/* x: [rows, heads, head_dim] float32, rows row_stride elements apart, rotated in place by positions[row]. */
MR_API mr_status mr_rotary_apply(mr_device* device, const mr_rotary* rotary, const int32_t* positions,
                                 int64_t rows, int32_t heads, int32_t head_dim, float* x, int64_t row_stride,
                                 mr_stream stream);

/* y = x with each pair (a, b) of a head turned by the angle t = positions[row] * inv_freq[i]:
 * (a cos t - b sin t, b cos t + a sin t) * magnitude. `inverse` turns by -t: of dy that is the gradient dx,
 * for the magnitude stays. Angles are exact to float32 at any position. */
typedef struct mr_rotary_args {
  mr_rotary rotary;
  const int32_t* positions; /* [rows] */
  int64_t rows;
  int32_t heads, head_dim;
  mr_rows x, y; /* [rows, heads * head_dim]; y may be x */
  int32_t inverse;
} mr_rotary_args;

MR_API mr_status mr_rotary_rows(mr_device* device, const mr_rotary_args* args, mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
