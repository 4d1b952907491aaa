// The gradients of cross-entropy over hidden W^T (millrace/kernels/cross_entropy.h) without its logits.
#pragma once

#include "kernels/cpu/context.h"
#include "millrace/kernels.h"

namespace millrace::cpu {

// The arguments were checked: strides and chunks are filled in. Of no rows too.
size_t linear_cross_entropy_backward_bytes(const mr_linear_cross_entropy_backward_args& args, int threads);
// Error{kBadInput} for a target outside, before anything is written.
void linear_cross_entropy_backward(const Context& ctx, const mr_linear_cross_entropy_backward_args& args,
                                   void* workspace);

}  // namespace millrace::cpu
