/* Normalization of rows: RMSNorm and LayerNorm, with a residual before and a quantization behind, and their
 * gradients. */
#ifndef MILLRACE_KERNELS_NORM_H
#define MILLRACE_KERNELS_NORM_H

#include "millrace/kernels/device.h"
#include "millrace/kernels/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y[r, :] = x[r, :] / sqrt(mean(x[r, :]^2) + eps) * weight. x, y: [rows, cols] float32, rows x_stride and
 * y_stride elements apart (0: cols); y may be x. weight: [cols]. */
MR_API mr_status mr_rmsnorm(mr_device* device, const float* x, int64_t x_stride, const float* weight,
                            float eps, int64_t rows, int64_t cols, float* y, int64_t y_stride,
                            mr_stream stream);

typedef enum mr_norm_kind {
  MR_NORM_RMS = 0,  /* n = s / sqrt(mean(s^2) + eps) */
  MR_NORM_LAYER = 1 /* n = (s - mean(s)) / sqrt(variance(s) + eps) */
} mr_norm_kind;

/* A scale is amax / 448 (FP8) or amax / 127 (INT8) of the values that share it, and a code the value divided
 * by it, rounded to nearest even; where all are zero scale and codes are 0. */
typedef enum mr_norm_quantize {
  MR_QUANTIZE_NONE = 0,
  MR_QUANTIZE_FP8_1X128 = 1, /* E4M3, a scale per 128 columns of a row: scales [rows, ceil(cols / 128)] */
  MR_QUANTIZE_FP8_ROW = 2,   /* E4M3, a scale per row: scales [rows] */
  MR_QUANTIZE_INT8_ROW = 3   /* int8, a scale per row: scales [rows] */
} mr_norm_quantize;

/* s = x + residual, rounded to sum's type (s = x without a residual); y = n * (weight + weight_offset) + bias
 */
typedef struct mr_norm_args {
  mr_norm_kind kind;
  int64_t rows, cols;
  mr_rows x;
  mr_rows residual;    /* or none */
  mr_rows sum;         /* s, with a residual alone; may be x or residual */
  mr_rows y;           /* may be x without a residual; may be none where the codes are wanted alone */
  mr_vector weight;    /* or none: 1 */
  mr_vector bias;      /* or none */
  float weight_offset; /* 0; 1 for models that store weight - 1 (Gemma) */
  float eps;
  float* mean;               /* [rows], or NULL: mean(s) of MR_NORM_LAYER, for the gradients */
  float* rstd;               /* [rows], or NULL: 1 / sqrt(.. + eps) */
  mr_norm_quantize quantize; /* of what y is before it is rounded */
  void* codes;               /* [rows, cols] bytes, rows codes_stride bytes apart (0: cols) */
  int64_t codes_stride;
  float* scales; /* rows scales_stride floats apart (0: packed) */
  int64_t scales_stride;
} mr_norm_args;

MR_API mr_status mr_norm(mr_device* device, const mr_norm_args* args, mr_stream stream);

/* With g = dy * (weight + weight_offset) and n as above: dx = rstd * (g - n mean(g n)) + dsum, for
 * MR_NORM_LAYER also without mean(g); dweight = sum over rows of dy * n, dbias of dy. dx is the gradient of x
 * and of residual alike. */
typedef struct mr_norm_backward_args {
  mr_norm_kind kind;
  int64_t rows, cols;
  mr_rows x; /* what was normed: x, or sum */
  mr_rows dy;
  mr_rows dsum;     /* the gradient that reaches sum from elsewhere, or none */
  mr_rows dx;       /* may be dy or dsum */
  mr_vector weight; /* or none: 1 */
  float weight_offset;
  const float* mean; /* [rows] of mr_norm, with MR_NORM_LAYER */
  const float* rstd; /* [rows] */
  mr_vector dweight; /* or none */
  mr_vector dbias;   /* or none */
} mr_norm_backward_args;

MR_API mr_status mr_norm_backward_workspace_bytes(const mr_device* device, const mr_norm_backward_args* args,
                                                  size_t* bytes);
MR_API mr_status mr_norm_backward(mr_device* device, const mr_norm_backward_args* args, void* workspace,
                                  size_t workspace_bytes, mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
