/* Products of plain matrices, for training and for whoever brings tensors as they lie in memory. (matmul.h is
 * the product with a weight of a model file, prepared once.)
 *
 *     c[m, n] = activation(alpha * sum_k op(a)[m, k] op(b)[k, n] * scales + bias[n]) + residual[m, n]
 *
 * Gated activations take two columns for an output: of n columns the first n / 2 are gates, the others what
 * they multiply, and c and residual are [m, n / 2].
 *
 * Forward and gradients of a linear layer y = x W^T, with W [out, in], are the three layouts:
 *     y  = x W^T      transpose_a 0, transpose_b 1  (NT)
 *     dx = dy W       transpose_a 0, transpose_b 0  (NN)
 *     dW = dy^T x     transpose_a 1, transpose_b 0  (TN)
 * Sums are float32 (int32 for MR_I8). The result does not depend on the run, and a row's not on other rows
 * (but see split_k).
 *
 * Eight-bit floats in training: x with a scale for 1 x 128, W with one for 128 x 128 and dy with one for
 * 1 x 128 (E5M2 or E4M3) are quantized once, as they lie, and all three products take them:
 *     y   a = x,  a_scale_rows 1, a_scale_cols 128;  b = W, 128 and 128  (NT; the grids that 0 stands for)
 *     dx  a = dy, 1 and 128;                         b = W, 128 and 128  (NN)
 *     dW  a = dy, 1 and 128;                         b = x, 1 and 128    (TN)
 */
#ifndef MILLRACE_KERNELS_GEMM_H
#define MILLRACE_KERNELS_GEMM_H

#include "millrace/kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mr_gemm_activation {
  MR_GEMM_NONE = 0,
  MR_GEMM_GELU = 1,      /* x / 2 * (1 + erf(x / sqrt(2))) */
  MR_GEMM_GELU_TANH = 2, /* by tanh */
  MR_GEMM_SILU = 3,      /* x * sigmoid(x) */
  MR_GEMM_SWIGLU = 4,    /* silu(gate) * up; n is even */
  /* g = min(gate, gate_limit), u = clamp(up, +-gate_limit): g * sigmoid(gate_alpha g) * (u + 1); n is even */
  MR_GEMM_CLAMPED_SWIGLU = 5
} mr_gemm_activation;

typedef struct mr_gemm_args {
  /* Of a and b: MR_BF16, MR_F16, MR_F8_E4M3, MR_F8_E5M2, MR_I8, MR_F32 (on a GPU by FMA, slow). */
  mr_dtype type;
  int64_t m, n, k;
  const void* a; /* [m, k] or, transposed, [k, m]; rows lda elements apart (0: packed) */
  int64_t lda;
  int32_t transpose_a;
  const void* b; /* [k, n] or, transposed, [n, k]; rows ldb elements apart (0: packed) */
  int64_t ldb;
  int32_t transpose_b;
  mr_dtype out_type; /* of c: MR_F32, MR_BF16, MR_F16, MR_F8_E4M3 (with c_scales) */
  void* c;           /* [m, n] or, gated, [m, n / 2]; rows ldc elements apart (0: packed) */
  int64_t ldc;

  float alpha; /* 0: 1 */
  /* MR_I8: float32 [m] and [n], or NULL. MR_F8_*: one for every 1 x 128 elements along k of a,
   * [m][a_scale_stride], and for every 128 x 128 of b (n by k), [ceil(n / 128)][b_scale_stride]; strides of
   * 0: ceil(k / 128); other grids: a_scale_rows. NULL for other types. */
  const float* a_scales;
  const float* b_scales;
  int64_t a_scale_stride, b_scale_stride;
  const float* bias; /* [n], or NULL */
  mr_gemm_activation activation;
  const void* residual; /* as c, of out_type, rows residual_stride elements apart (0: ldc), or NULL; may be c.
                           Not with MR_F8_E4M3. */
  int64_t residual_stride;

  float gate_alpha, gate_limit; /* of MR_GEMM_CLAMPED_SWIGLU; 0 with the others */
  /* Of an out_type of MR_F8_E4M3, as a_scales of a next product takes them: one for every 1 x 128 outputs,
   * the largest magnitude / 448, [m][c_scale_stride] (0: one for every 128 columns of c). NULL for other
   * types. */
  float* c_scales;
  int64_t c_scale_stride;

  /* Of b where it is not that of a; MR_F32 (0): `type`. MR_BF16 or MR_F16 beside a float of another type, and
   * MR_F8_E4M3 and MR_F8_E5M2 beside one another. (Two types, MR_F8_E5M2 and other grids than those of 0 and
   * 0 a GPU multiplies to 22 bits of mantissa, at a fraction of the others' speed.) */
  mr_dtype b_type;
  /* MR_F8_*: so many rows and columns of a and of b, as they lie (before transposing), share a scale; each 1
   * or 128. The scales of a matrix of R x C are [ceil(R / scale_rows)][ceil(C / scale_cols)], rows
   * scale_stride apart (0: packed). 0 and 0: the grid described at a_scales. */
  int32_t a_scale_rows, a_scale_cols;
  int32_t b_scale_rows, b_scale_cols;
  /* 1: where there are few rows a GPU may multiply parts of k at the same time and add their sums in order.
   * The same bits in every run, but a row's then depend on m and n. 0: they do not. A CPU takes both and does
   * the same. Measured with k 14,336 on an H200: no faster than 0 (docs/kernels/cuda_dense_gemm.md). */
  int32_t split_k;
} mr_gemm_args;

/* As fast as it gets on Hopper where a, b, c and their rows are aligned to 16 bytes, and both operands of an
 * 8-bit type have k contiguous (transpose_a 0, transpose_b 1). */
MR_API mr_status mr_gemm_workspace_bytes(const mr_device* device, const mr_gemm_args* args, size_t* bytes);
MR_API mr_status mr_gemm(mr_device* device, const mr_gemm_args* args, void* workspace, size_t workspace_bytes,
                         mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
