/* Products of experts' matrices with rows that are sorted by expert, for training mixtures of experts: the
 * rows of all experts in one call, how many each has known to the device alone. W is [experts, n, k].
 *
 *     MR_GROUPED_FORWARD   y[r, n]     = alpha * sum_k x[r, k] W[e(r)][n, k]
 *     MR_GROUPED_DGRAD     dx[r, k]    = alpha * sum_n dy[r, n] W[e(r)][n, k]
 *     MR_GROUPED_WGRAD     dW[e][n, k] = alpha * sum of dy[r, n] x[r, k] over e's rows (zeros where it has
 * none)
 *
 * Weights of four bits: lowbit.h, whose gradient of the weights is MR_GROUPED_WGRAD here. Sums are float32;
 * the result does not depend on the run, and a row's not on other rows. */
#ifndef MILLRACE_KERNELS_GROUPED_GEMM_H
#define MILLRACE_KERNELS_GROUPED_GEMM_H

#include "millrace/kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mr_grouped_op {
  MR_GROUPED_FORWARD = 0,
  MR_GROUPED_DGRAD = 1,
  MR_GROUPED_WGRAD = 2
} mr_grouped_op;

typedef struct mr_grouped_gemm_args {
  mr_grouped_op op;
  /* Of a and b: MR_BF16, MR_F16, MR_F8_E4M3. (Its gradients are slow on a GPU; that of the rows is as fast as
   * the forward by MR_GROUPED_FORWARD of the weights' transpose, quantized [experts, k, n].) */
  mr_dtype type;
  int64_t experts, m, n, k;
  /* [experts + 1] in memory of the device: rows offsets[e] to offsets[e + 1] - 1 are expert e's; from 0 to m,
   * none less than the one before (which a CPU checks). */
  const int32_t* offsets;
  const void* a; /* x [m, k] or, for gradients, dy [m, n]; rows lda elements apart (0: packed) */
  int64_t lda;
  const void* b;     /* W, packed; MR_GROUPED_WGRAD: x [m, k], rows ldb elements apart (0: packed) */
  int64_t ldb;       /* 0 for W */
  mr_dtype out_type; /* of c: MR_F32, MR_BF16, MR_F16 */
  void* c;           /* y [m, n] or dx [m, k], rows ldc elements apart (0: packed); dW, packed */
  int64_t ldc;       /* 0 for dW */
  float alpha;       /* 0: 1 */
  /* MR_F8_E4M3: one for every 1 x 128 elements of x, [m][ceil(k / 128)], and of dy, [m][ceil(n / 128)], and
   * for every 128 x 128 of an expert's matrix, [experts][ceil(n / 128)][ceil(k / 128)]: all three products
   * take what was quantized once. NULL for other types. */
  const float* a_scales;
  const float* b_scales;
} mr_grouped_gemm_args;

/* As fast as it gets on Hopper where a, b, c and their rows are aligned to 16 bytes. */
MR_API mr_status mr_grouped_gemm_workspace_bytes(const mr_device* device, const mr_grouped_gemm_args* args,
                                                 size_t* bytes);
MR_API mr_status mr_grouped_gemm(mr_device* device, const mr_grouped_gemm_args* args, void* workspace,
                                 size_t workspace_bytes, mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
