/* Quantizing and dequantizing rows: float32 to and from every block type. */
#ifndef MILLRACE_KERNELS_QUANT_H
#define MILLRACE_KERNELS_QUANT_H

#include "millrace/kernels/device.h"
#include "millrace/kernels/matmul.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of a row of `cols` elements, which must be whole blocks. */
MR_API mr_status mr_row_bytes(mr_dtype type, int64_t cols, size_t* bytes);

/* x [rows, cols] float32, finite -> out, rows one after the other. The scale of every block is searched for
 * the least squared error; `importance` [cols] weighs the columns' errors, or NULL: all alike. Host memory,
 * on a CPU device; the bytes are the same on every instruction set. */
MR_API mr_status mr_quantize(mr_device* device, mr_dtype type, const float* x, int64_t rows, int64_t cols,
                             const float* importance, void* out);

/* Rows [first, first + rows) of a matrix (host memory, as mr_matrix describes it) -> out [rows, cols]
 * float32, host memory. */
MR_API mr_status mr_dequantize(mr_device* device, const mr_matrix* matrix, int64_t first, int64_t rows,
                               float* out);

#ifdef __cplusplus
}
#endif
#endif
