/* Activation functions of rows, and their gradients. */
#ifndef MILLRACE_KERNELS_ACTIVATION_H
#define MILLRACE_KERNELS_ACTIVATION_H

#include "millrace/kernels/device.h"
#include "millrace/kernels/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mr_activation_kind {
  MR_ACTIVATION_GELU = 0,      /* x Phi(x), by erf */
  MR_ACTIVATION_GELU_TANH = 1, /* x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) */
  MR_ACTIVATION_SILU = 2,      /* x sigmoid(x) */
  MR_ACTIVATION_SWIGLU = 3,    /* silu(x) * up */
  /* g = min(x, limit), u = clamp(up, +-limit): g * sigmoid(alpha g) * (u + 1). At the limit itself the
   * gradient goes through, beyond it is 0. */
  MR_ACTIVATION_CLAMPED_SWIGLU = 4,
  MR_ACTIVATION_GEGLU = 5,     /* gelu(x) * up, by erf */
  MR_ACTIVATION_GEGLU_TANH = 6 /* the same by tanh */
} mr_activation_kind;

typedef struct mr_activation_args {
  mr_activation_kind kind;
  int64_t rows, cols;
  mr_rows x;          /* the gate of those with up */
  mr_rows up;         /* of kinds from MR_ACTIVATION_SWIGLU on; none with the others */
  mr_rows y;          /* may be x or up */
  float alpha, limit; /* of MR_ACTIVATION_CLAMPED_SWIGLU */
} mr_activation_args;

MR_API mr_status mr_activation_rows(mr_device* device, const mr_activation_args* args, mr_stream stream);

typedef struct mr_activation_backward_args {
  mr_activation_kind kind;
  int64_t rows, cols;
  mr_rows x, up, dy;
  mr_rows dx;  /* may be x, up or dy */
  mr_rows dup; /* where there is an up; may be x, up or dy, another one than dx */
  float alpha, limit;
} mr_activation_backward_args;

MR_API mr_status mr_activation_rows_backward(mr_device* device, const mr_activation_backward_args* args,
                                             mr_stream stream);

#ifdef __cplusplus
}
#endif
#endif
