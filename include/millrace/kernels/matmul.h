/* Dense products y = x W^T + b for weights of every type (GEMM for many rows, GEMV for few: one call, the
 * same bits for a row either way).
 *
 * A weight is described where it lies (mr_matrix, the layout of GGUF and safetensors files) and made into
 * what the device multiplies by mr_weight_create: a CPU uses it in place or interleaves rows, a GPU repacks
 * it into tiles for its tensor cores. */
#ifndef MILLRACE_KERNELS_MATMUL_H
#define MILLRACE_KERNELS_MATMUL_H

#include "millrace/kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* [experts, rows, cols] in HOST memory; experts is 1 for a plain matrix. cols is whole blocks of the type. */
typedef struct mr_matrix {
  mr_dtype type;
  int64_t experts, rows, cols;
  const void* data;
  int64_t row_stride_bytes; /* between rows; expert e begins at row e * rows. 0: rows lie packed */
  /* MR_MXFP4_SPLIT: e8m0 bytes (scale_type is ignored), one per 32 columns of a row.
   * MR_F8_E4M3: MR_F32 or MR_BF16, one per patch of rows_per_scale x cols_per_scale. NULL for other types. */
  const void* scales;
  mr_dtype scale_type;
  int64_t rows_per_scale, cols_per_scale, scales_per_row;
} mr_matrix;

typedef struct mr_weight mr_weight;

/* Bytes of device memory that mr_weight_create fills for this matrix; on a CPU 0 means: used in place, and
 * the matrix must outlive the weight. */
MR_API mr_status mr_weight_bytes(const mr_device* device, const mr_matrix* matrix, size_t* bytes);
/* Returns when the host memory may go (unless it is used in place). memory: mr_weight_bytes, 256-byte
 * aligned. */
MR_API mr_status mr_weight_create(mr_device* device, const mr_matrix* matrix, void* memory,
                                  size_t memory_bytes, mr_weight** weight);
/* How many of those bytes, from the first on, a weight goes on using once it is made. */
MR_API mr_status mr_weight_kept_bytes(const mr_device* device, const mr_matrix* matrix, size_t* bytes);
/* The weight that mr_weight_create made of such a matrix on such a GPU, in this memory or in a copy of what
 * is kept of it: for callers who hold memory and no handles. The matrix gives type and shape (data and scales
 * are not read); nothing is computed or waited for. GPUs alone: a CPU uses most matrices in place. */
MR_API mr_status mr_weight_adopt(mr_device* device, const mr_matrix* matrix, void* memory,
                                 size_t memory_bytes, mr_weight** weight);
MR_API void mr_weight_destroy(mr_weight* weight);

typedef struct mr_matmul_args {
  const mr_weight* weight; /* [out, in] */
  const float* bias;       /* [out], or NULL */
  const float* x;          /* [rows, in] float32, rows x_stride elements apart (0: in) */
  int64_t x_stride;
  float* y; /* [rows, out] float32, rows y_stride elements apart (0: out) */
  int64_t y_stride;
  int64_t rows;
  int32_t accumulate; /* 1: y += */
} mr_matmul_args;

MR_API mr_status mr_matmul_workspace_bytes(const mr_device* device, const mr_weight* weight, int64_t rows,
                                           size_t* bytes);
MR_API mr_status mr_matmul(mr_device* device, const mr_matmul_args* args, void* workspace,
                           size_t workspace_bytes, mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
