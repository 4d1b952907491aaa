/* One attention layer that decodes on a GPU, for a C program: the keys and values of a sequence stay on the
 * GPU, a call brings one token. The plain baseline is in flash_attention_v2.h; both build as a small library
 * of their own for any GPU from sm_75 on (make fa2-opt).
 *
 *     out[h] = sum_j softmax_j(q[h] . k[h / group, j] / sqrt(head_dim)) v[h / group, j]
 *     group  = batch_heads / kv_heads, a whole number; j over all tokens so far, the new one included
 *
 * Several sequences of one length are more heads: batch_heads = batch x heads, kv_heads = batch x KV heads.
 *
 *     Uninitialized --init--> Initialized --load_qkv--> Ready --decode_gpu--> Ready --get_output--> Ready
 *
 * Ready -> load_qkv for the next token. reset (from any state but Uninitialized) -> Initialized; cleanup
 * (from any state) -> Uninitialized. A call that is not in this order, a full sequence and bad arguments get
 * a status, mr_last_error() has a line, and nothing is changed.
 *
 * A handle belongs to the GPU that was current when it was made, and is used by one thread at a time. Keys
 * and values are kept in FP16: |values| up to 65504. Products are FP16 on tensor cores, sums and output
 * float32. */
#ifndef MILLRACE_KERNELS_FLASH_ATTENTION_V2_OPTIMIZED_H
#define MILLRACE_KERNELS_FLASH_ATTENTION_V2_OPTIMIZED_H

#include "millrace/kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct flash_attention_v2_opt flash_attention_v2_opt;

/* Allocates buffers and two streams, once: 2 x kv_heads x max_seq x (head_dim, padded to 64, 128 or 256) x 2
 * bytes of cache and about 10 MB beside it. head_dim 1 to 256, max_seq 1 to 16,777,216. *handle must be NULL.
 */
MR_API mr_status flash_attention_v2_opt_init(flash_attention_v2_opt** handle, int32_t batch_heads,
                                             int32_t kv_heads, int32_t head_dim, int32_t max_seq);

/* One token from host memory: q [batch_heads, head_dim], k and v [kv_heads, head_dim]. They are read before
 * the call returns; the copy stream converts them to FP16 and writes them at the current position, beside a
 * decode that still runs. The token must be decoded before the next one is loaded. */
MR_API mr_status flash_attention_v2_opt_load_qkv(flash_attention_v2_opt* handle, const float* q,
                                                 const float* k, const float* v);

/* An extension: keys and values of `tokens` tokens at once, k and v [kv_heads, tokens, head_dim] in host
 * memory, at the current position. The length grows by `tokens`; there is no output. Waits for its copies.
 * Not between load_qkv and decode_gpu. */
MR_API mr_status flash_attention_v2_opt_load_prompt(flash_attention_v2_opt* handle, const float* k,
                                                    const float* v, int32_t tokens);

/* Attends over all tokens so far and the loaded one, on the compute stream, which waits for the copy by an
 * event. Returns at once; the length has grown by one. */
MR_API mr_status flash_attention_v2_opt_decode_gpu(flash_attention_v2_opt* handle);

/* Waits for the last decode; out [batch_heads, head_dim] in host memory. The only copy back. */
MR_API mr_status flash_attention_v2_opt_get_output(flash_attention_v2_opt* handle, float* out);

/* A new sequence in the same memory. NULL: the one that flash_attention_v2_opt_decode keeps for this thread.
 */
MR_API mr_status flash_attention_v2_opt_reset(flash_attention_v2_opt* handle);

/* Waits, frees everything and sets *handle to NULL; may be called again then. A NULL `handle`: the one that
 * flash_attention_v2_opt_decode keeps for this thread, which the end of the thread frees otherwise. */
MR_API mr_status flash_attention_v2_opt_cleanup(flash_attention_v2_opt** handle);

/* All of it for one token, from and to host memory: init on the first call of a thread (and when the shape is
 * another: the sequence begins anew), load_qkv, decode_gpu, get_output. Every call is the sequence's next
 * token until flash_attention_v2_opt_reset(NULL). */
MR_API mr_status flash_attention_v2_opt_decode(const float* q, const float* k, const float* v, float* out,
                                               int32_t batch_heads, int32_t kv_heads, int32_t head_dim,
                                               int32_t max_seq);

#ifdef __cplusplus
}
#endif
#endif
