/* Mixture of experts: top-k routing, and the chosen experts' gated feed-forward.
 *
 *     route:    chosen[t, :], weights[t, :] = top k of scores[t, :] and their softmax
 *     experts:  y[t, :] += sum_s weights[t, s] * (W_down[e] act(W_gate[e] x[t], W_up[e] x[t]) + b_down[e]),
 *               e = chosen[t, s], slots in order */
#ifndef MILLRACE_KERNELS_MOE_H
#define MILLRACE_KERNELS_MOE_H

#include "millrace/kernels/device.h"
#include "millrace/kernels/matmul.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mr_softmax_over {
  MR_SOFTMAX_CHOSEN = 0, /* over the k chosen scores (gpt-oss; the same as over all, renormalized) */
  MR_SOFTMAX_ALL = 1     /* over all scores, then the chosen ones' shares as they are */
} mr_softmax_over;

/* scores [rows, experts] float32 -> chosen [rows, k] int32 and weights [rows, k] float32. Ties and NaN go to
 * the lower index. */
MR_API mr_status mr_moe_route(mr_device* device, const float* scores, int64_t rows, int32_t experts,
                              int32_t k, mr_softmax_over softmax_over, int32_t* chosen, float* weights,
                              mr_stream stream);

typedef enum mr_activation {
  MR_SWIGLU = 0,        /* silu(gate) * up */
  MR_CLAMPED_SWIGLU = 1 /* g = min(gate, limit), u = clamp(up, +-limit): g * sigmoid(alpha g) * (u + 1) */
} mr_activation;

typedef struct mr_moe_args {
  const mr_weight *gate, *up, *down; /* [experts, ffn, hidden] twice, [experts, hidden, ffn] */
  const float *gate_bias, *up_bias;  /* [experts, ffn], or NULL */
  const float* down_bias;            /* [experts, hidden], or NULL */
  mr_activation activation;
  float alpha, limit; /* of MR_CLAMPED_SWIGLU; 1.702 and 7 in gpt-oss */
  int32_t k;
  const int32_t* chosen; /* [rows, k] */
  const float* weights;  /* [rows, k] */
  const float* x;        /* [rows, hidden] float32, contiguous */
  float* y;              /* [rows, hidden] float32, contiguous: added to */
  int64_t rows;
} mr_moe_args;

MR_API mr_status mr_moe_workspace_bytes(const mr_device* device, const mr_moe_args* args, size_t* bytes);
MR_API mr_status mr_moe(mr_device* device, const mr_moe_args* args, void* workspace, size_t workspace_bytes,
                        mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
