/* Linear attention and state-space layers: the gated delta rule, Mamba-2's selective scan, RWKV 7's
 * recurrence, gradients of all three, and the short convolution before them (docs/kernels/state_space.md).
 *
 * Sequences are packed: tokens of all of them one after the other, sequence s from cu_seqlens[s] to
 * cu_seqlens[s + 1]. Everything is float32 and contiguous. A sequence is computed in chunks of 16 tokens from
 * its first token on, so that one that begins with a final state of a whole number of chunks has the bits
 * that it has in one piece, in any batch, with any number of threads and, on a CPU, with any instruction set.
 * Outputs do not overlap inputs. A GPU multiplies in TF32 (operands of ten bits of mantissa) and adds in
 * float32, needs no workspace, and has a state of at most 256 keys: key_dim, state_dim. */
#ifndef MILLRACE_KERNELS_LINEAR_ATTENTION_H
#define MILLRACE_KERNELS_LINEAR_ATTENTION_H

#include "millrace/kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of each value head, with S its state [key_dim][value_dim]:
 *   S = exp(g) S;  S += k (beta (v - S^T k))^T;  out = S^T (scale q)
 * Value head h has the query and key of key head h / (value_heads / key_heads). */
typedef struct mr_gated_delta_args {
  const float* q;             /* [tokens][key_heads][key_dim] */
  const float* k;             /* the same; as the caller norms it */
  const float* v;             /* [tokens][value_heads][value_dim] */
  const float* g;             /* [tokens][value_heads]: logarithms, at most 0; NULL: nothing decays */
  const float* beta;          /* [tokens][value_heads]; NULL: 1 */
  float scale;                /* of the queries; 0: 1 / sqrt(key_dim) */
  const float* initial_state; /* [sequences][value_heads][key_dim][value_dim]; NULL: zeros */
  float* final_state;         /* the same; NULL: not wanted. It may be initial_state */
  const int32_t* cu_seqlens;  /* [sequences + 1] */
  float* out;                 /* [tokens][value_heads][value_dim] */
  int32_t sequences, key_heads, value_heads, key_dim, value_dim;
  int32_t most_tokens; /* host: no sequence has more; 0: not known. It chooses a GPU's kernel and no bit */
} mr_gated_delta_args;

MR_API mr_status mr_gated_delta_workspace_bytes(mr_device* device, const mr_gated_delta_args* args,
                                                size_t* bytes);
MR_API mr_status mr_chunk_gated_delta_rule(mr_device* device, const mr_gated_delta_args* args,
                                           void* workspace, size_t workspace_bytes, mr_stream stream);

/* Mamba-2. Of each head, with S its state [state_dim][head_dim]:
 *   S = exp(dt a) S + b (dt x)^T;  out = S^T c + d x
 * Head h has b and c of group h / (heads / groups). */
typedef struct mr_selective_scan_args {
  const float* x;             /* [tokens][heads][head_dim] */
  const float* dt;            /* [tokens][heads]: behind softplus, not negative */
  const float* a;             /* [heads], at most 0 */
  const float* b;             /* [tokens][groups][state_dim] */
  const float* c;             /* the same */
  const float* d;             /* [heads]; NULL: 0 */
  const float* initial_state; /* [sequences][heads][state_dim][head_dim]; NULL: zeros */
  float* final_state;         /* the same; NULL: not wanted. It may be initial_state */
  const int32_t* cu_seqlens;  /* [sequences + 1] */
  float* out;                 /* [tokens][heads][head_dim] */
  int32_t sequences, groups, heads, state_dim, head_dim;
  int32_t most_tokens; /* as above */
} mr_selective_scan_args;

MR_API mr_status mr_selective_scan_workspace_bytes(mr_device* device, const mr_selective_scan_args* args,
                                                   size_t* bytes);
MR_API mr_status mr_selective_scan(mr_device* device, const mr_selective_scan_args* args, void* workspace,
                                   size_t workspace_bytes, mr_stream stream);

/* RWKV 7's recurrence. Of each head, with S its state [key_dim][value_dim], before it is changed:
 *   u = S^T a;  S = diag(exp(w)) S + b u^T + k v^T;  out = S^T (scale r)
 * On CPUs: another device returns MR_ERROR_UNSUPPORTED. */
typedef struct mr_wkv7_args {
  const float* r;             /* [tokens][heads][key_dim] */
  const float* w;             /* the same: logarithms of decays */
  const float* k;             /* the same */
  const float* v;             /* [tokens][heads][value_dim] */
  const float *a, *b;         /* [tokens][heads][key_dim]; RWKV 7: -key and key * rate, of keys of length 1 */
  float scale;                /* of r; 0: 1 */
  const float* initial_state; /* [sequences][heads][key_dim][value_dim]; NULL: zeros */
  float* final_state;         /* the same; NULL: not wanted. It may be initial_state */
  const int32_t* cu_seqlens;  /* [sequences + 1] */
  float* out;                 /* [tokens][heads][value_dim] */
  int32_t sequences, heads, key_dim, value_dim;
  int32_t most_tokens; /* as above */
} mr_wkv7_args;

MR_API mr_status mr_wkv7_workspace_bytes(mr_device* device, const mr_wkv7_args* args, size_t* bytes);
MR_API mr_status mr_chunk_wkv7(mr_device* device, const mr_wkv7_args* args, void* workspace,
                               size_t workspace_bytes, mr_stream stream);

/* Gradients. `forward` is what the forward call got; its out and final_state are not looked at. Gradients
 * that are NULL are not computed; the others are written, not added to. Sums have one order: the same bits
 * each time. Nothing grows with the square of a length.
 * A CPU adds in double, with the same bits on any number of threads; of each thread's longest sequence the
 * workspace has a state in double for each 16 tokens and 18 besides. cu_seqlens is read by the workspace
 * functions too. A GPU multiplies in bf16 where it has warpgroup products (H100, H200), else in TF32, and
 * adds in float32: errors of up to 1e-2 of an array's largest were seen in bf16, of 7e-4 in TF32. It needs
 * forward.most_tokens, by which the workspace is sized: of lengths that lie on a GPU nobody checks that none
 * is longer. Keys and values have at most 128 dimensions, and of each sequence and head the workspace has at
 * most two states and 256 rows of values for each 64 of most_tokens. Of wkv7 it returns
 * MR_ERROR_UNSUPPORTED. */
typedef struct mr_gated_delta_backward_args {
  mr_gated_delta_args forward;
  const float* d_out;                                 /* [tokens][value_heads][value_dim] */
  const float* d_final_state;                         /* NULL: zeros */
  float *dq, *dk, *dv, *dg, *dbeta, *d_initial_state; /* shapes of what they are gradients of */
} mr_gated_delta_backward_args;

MR_API mr_status mr_gated_delta_backward_workspace_bytes(mr_device* device,
                                                         const mr_gated_delta_backward_args* args,
                                                         size_t* bytes);
MR_API mr_status mr_gated_delta_backward(mr_device* device, const mr_gated_delta_backward_args* args,
                                         void* workspace, size_t workspace_bytes, mr_stream stream);

/* Plain linear attention is this with dt of ones and a of zeros. */
typedef struct mr_selective_scan_backward_args {
  mr_selective_scan_args forward;
  const float* d_out;                                    /* [tokens][heads][head_dim] */
  const float* d_final_state;                            /* NULL: zeros */
  float *dx, *ddt, *da, *db, *dc, *dd, *d_initial_state; /* shapes of what they are gradients of */
} mr_selective_scan_backward_args;

MR_API mr_status mr_selective_scan_backward_workspace_bytes(mr_device* device,
                                                            const mr_selective_scan_backward_args* args,
                                                            size_t* bytes);
MR_API mr_status mr_selective_scan_backward(mr_device* device, const mr_selective_scan_backward_args* args,
                                            void* workspace, size_t workspace_bytes, mr_stream stream);

typedef struct mr_wkv7_backward_args {
  mr_wkv7_args forward;
  const float* d_out;                                   /* [tokens][heads][value_dim] */
  const float* d_final_state;                           /* NULL: zeros */
  float *dr, *dw, *dk, *dv, *da, *db, *d_initial_state; /* shapes of what they are gradients of */
} mr_wkv7_backward_args;

MR_API mr_status mr_wkv7_backward_workspace_bytes(mr_device* device, const mr_wkv7_backward_args* args,
                                                  size_t* bytes);
MR_API mr_status mr_wkv7_backward(mr_device* device, const mr_wkv7_backward_args* args, void* workspace,
                                  size_t workspace_bytes, mr_stream stream);

/* out[t][c] = act(bias[c] + sum over i of weight[c][i] x[t - taps + 1 + i][c]), a convolution of each channel
 * by itself. Tokens before the first of a sequence are its initial rows. */
typedef struct mr_short_conv_args {
  const float* x;            /* [tokens][channels] */
  const float* weight;       /* [channels][taps] */
  const float* bias;         /* [channels]; NULL: none */
  const float* initial_rows; /* [sequences][taps - 1][channels], oldest first; NULL: zeros */
  float* final_rows;         /* the same behind the last token; NULL: not wanted */
  const int32_t* cu_seqlens; /* [sequences + 1] */
  float* out;                /* [tokens][channels] */
  int64_t channels;
  int32_t sequences, taps; /* taps: 1 to 17 */
  int32_t silu;            /* 1: act is SiLU; 0: none */
  int32_t most_tokens;     /* as above */
} mr_short_conv_args;

MR_API mr_status mr_short_conv(mr_device* device, const mr_short_conv_args* args, mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
