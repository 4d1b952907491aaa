/* Normalization of rows. */
#ifndef MILLRACE_KERNELS_NORM_H
#define MILLRACE_KERNELS_NORM_H

#include "millrace/kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y[r, :] = x[r, :] / sqrt(mean(x[r, :]^2) + eps) * weight. x, y: [rows, cols] float32, rows x_stride and
 * y_stride elements apart (0: cols); y may be x. weight: [cols]. */
MR_API mr_status mr_rmsnorm(mr_device* device, const float* x, int64_t x_stride, const float* weight,
                            float eps, int64_t rows, int64_t cols, float* y, int64_t y_stride,
                            mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
