/* Products of two matrices of e2m1 codes with a scale for every block of a row, MXFP4 or NVFP4, as Blackwell
 * multiplies them:
 *
 *     c[m, n] = alpha * sum_k a[m, k] b[n, k]
 *
 * Codes lie in rows of k / 2 bytes, the even column in the lower four bits; scales in rows of k / 32 (MXFP4,
 * e8m0) or k / 16 bytes (NVFP4, e4m3). The second scales of NVFP4, one a matrix, go to alpha. Sums are
 * float32; the result does not depend on the run, and a row's not on other rows.
 *
 * sm_120a multiplies them by mma.sync with block scales where k is a multiple of 64 and codes are aligned to
 * 16 bytes; sm_100a by tcgen05.mma where k is a multiple of 32 and codes are aligned to 16 bytes, with a
 * workspace for the scales in tiles. Both are compiled, and their operands' layouts and descriptors tested
 * against an emulation on the host; nobody has run them. Every other GPU takes a kernel without tensor cores.
 */
#ifndef MILLRACE_KERNELS_FP4_GEMM_H
#define MILLRACE_KERNELS_FP4_GEMM_H

#include "millrace/kernels/device.h"
#include "millrace/kernels/lowbit.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mr_fp4_gemm_args {
  mr_lowbit_format format;  /* MR_LOWBIT_MXFP4 or MR_LOWBIT_NVFP4, of both */
  int64_t m, n, k;          /* k: whole blocks */
  const void *a, *a_scales; /* [m][k / 2], [m][k / 32 or k / 16] */
  const void *b, *b_scales; /* [n][k / 2], [n][k / 32 or k / 16] */
  float alpha;              /* 0: 1 */
  mr_dtype out_type;        /* MR_F32, MR_BF16, MR_F16 */
  void* c;                  /* [m, n], rows ldc elements apart (0: packed) */
  int64_t ldc;
} mr_fp4_gemm_args;

MR_API mr_status mr_fp4_gemm_workspace_bytes(const mr_device* device, const mr_fp4_gemm_args* args,
                                             size_t* bytes);
MR_API mr_status mr_fp4_gemm(mr_device* device, const mr_fp4_gemm_args* args, void* workspace,
                             size_t workspace_bytes, mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
