/* The plain baseline beside flash_attention_v2_optimized.h: one decode step from host memory to host memory,
 * nothing kept between calls but the buffers. It is what the resident version is measured against. */
#ifndef MILLRACE_KERNELS_FLASH_ATTENTION_V2_H
#define MILLRACE_KERNELS_FLASH_ATTENTION_V2_H

#include "millrace/kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* out[h] = sum_j softmax_j(q[h] . k[h / group, j] / sqrt(head_dim)) v[h / group, j] over seq_len keys,
 * float32 throughout, one block of threads a head. All four are host memory: q and out [batch_heads,
 * head_dim], k and v [kv_heads, seq_len, head_dim]; Q, K and V are copied to the GPU on every call. Buffers
 * of the largest call so far stay with the thread until it ends. head_dim 1 to 256, group = batch_heads /
 * kv_heads whole. */
MR_API mr_status flash_attention_v2_decode(const float* q, const float* k, const float* v, float* out,
                                           int32_t batch_heads, int32_t kv_heads, int32_t head_dim,
                                           int32_t seq_len);

#ifdef __cplusplus
}
#endif
#endif
