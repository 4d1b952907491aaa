/* Products of bf16 activations with weights of four bits, alone or of experts, and their gradient:
 *
 *     forward    y[m, n]  = alpha * scale[e] * sum_k x[m, k] w[e][n, k] + bias[e][n]
 *     backward   dx[m, k] = alpha * scale[e] * sum_n dy[m, n] w[e][n, k]         (the weights stay four bits)
 *
 * Weights come as they are published and are repacked once, by mr_lowbit_repack, into the layout that the
 * device multiplies: 64 rows x 128 columns in one run of bytes, for a GPU as kernels/quant/lowbit_units.h has
 * it, for a CPU as kernels/cpu/matmul/lowbit_task.h, so that repacked weights are of use to that device
 * alone. They take 4.25 bits a weight for MXFP4, 4.5 for NVFP4, 4.19 and 4.75 for INT4 in groups of 128
 * and 32. A weight is a bf16: MXFP4   e2m1 * 2^(scale - 127), exact for scales from 2^-94 to 2^33 NVFP4 e2m1
 * * e4m3, exact; the second, float32 scale of a matrix goes to expert_scales INT4    (code - zero) * scale,
 * rounded to bf16 once Sums are float32 (on Hopper in segments of 4,096 of k or n, added in order): the
 * result does not depend on the run, and a row's bits not on other rows nor on how many there are. */
#ifndef MILLRACE_KERNELS_LOWBIT_H
#define MILLRACE_KERNELS_LOWBIT_H

#include "millrace/kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mr_lowbit_format {
  MR_LOWBIT_MXFP4 = 0,    /* an e8m0 scale for every 32 columns */
  MR_LOWBIT_NVFP4 = 1,    /* an e4m3 scale for every 16 columns: no sign, no NaN */
  MR_LOWBIT_INT4_32 = 2,  /* an f16 scale and a zero for every 32 columns */
  MR_LOWBIT_INT4_128 = 3, /* the same for every 128 */
} mr_lowbit_format;

/* How a matrix [n, k] was published. Groups are consecutive columns (GPTQ: desc_act false). */
typedef enum mr_lowbit_packing {
  /* MXFP4 and NVFP4. codes [n][k / 2] bytes, the even column in the lower four bits; scales [n][k / 32] or
   * [n][k / 16] bytes. */
  MR_LOWBIT_ROWS = 0,
  /* INT4. codes int32 [k / 8][n], column 8i + j in bits 4j; zeros int32 [k / group][n / 8], row 8i + j in
   * bits 4j, one less than they are; scales f16 [k / group][n]. */
  MR_LOWBIT_GPTQ = 1,
  MR_LOWBIT_GPTQ_V2 = 2, /* the same, zeros as they are */
  /* INT4. codes int32 [k][n / 8], rows 8i + (0, 2, 4, 6, 1, 3, 5, 7) from the lowest bits on; zeros int32
   * [k / group][n / 8] likewise, as they are; scales f16 [k / group][n]. */
  MR_LOWBIT_AWQ = 3
} mr_lowbit_packing;

typedef struct mr_lowbit_matrix {
  mr_lowbit_format format;
  mr_lowbit_packing packing;
  int64_t experts; /* one after the other; 1 for a plain matrix */
  int64_t n, k;    /* k: whole groups; GPTQ and AWQ: n and k multiples of 8 */
  const void* codes;
  const void* scales;
  const void* zeros; /* INT4; else NULL */
} mr_lowbit_matrix;

/* Bytes of the repacked matrix: codes, scales and zeros in one. */
MR_API mr_status mr_lowbit_bytes(const mr_lowbit_matrix* matrix, size_t* bytes);
/* `to`: so many bytes of the device, 64-byte aligned. The published matrix is not needed any more once the
 * stream is there. */
MR_API mr_status mr_lowbit_repack(mr_device* device, const mr_lowbit_matrix* matrix, void* to, size_t bytes,
                                  mr_stream stream);

typedef struct mr_lowbit_gemm_args {
  mr_lowbit_format format;
  int64_t experts, n, k;
  const void* weights;        /* repacked */
  const float* expert_scales; /* [experts], or NULL: 1 */
  int32_t backward;
  int64_t m;
  /* [experts + 1] in memory of the device: rows offsets[e] to offsets[e + 1] - 1 are expert e's; from 0 to m,
   * none less than the one before (which a CPU checks). NULL where experts is 1: all of them. */
  const int32_t* offsets;
  const void* x; /* bf16 [m, k] or, backward, [m, n]; rows ldx elements apart (0: packed) */
  int64_t ldx;
  mr_dtype out_type; /* MR_F32, MR_BF16, MR_F16 */
  void* y;           /* [m, n] or, backward, [m, k]; rows ldy elements apart (0: packed) */
  int64_t ldy;
  float alpha;       /* 0: 1 */
  const float* bias; /* [experts, n], or NULL; forward alone */
} mr_lowbit_gemm_args;

/* As fast as it gets on Hopper where x, y and their rows are aligned to 16 bytes. */
MR_API mr_status mr_lowbit_gemm_workspace_bytes(const mr_device* device, const mr_lowbit_gemm_args* args,
                                                size_t* bytes);
MR_API mr_status mr_lowbit_gemm(mr_device* device, const mr_lowbit_gemm_args* args, void* workspace,
                                size_t workspace_bytes, mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
