// RWKV 7's recurrence over ragged sequences of tensors: the C API's (millrace/kernels/linear_attention.h),
// whose arguments were checked. Sequences and heads are shared out over threads; a sequence's chunks follow
// one another.
#pragma once

#include "kernels/cpu/context.h"
#include "millrace/kernels/linear_attention.h"

namespace millrace::cpu {

size_t wkv7_workspace_bytes(int32_t key_dim, int32_t value_dim, int threads);
void wkv7(const Context& ctx, const mr_wkv7_args& args, void* workspace);

}  // namespace millrace::cpu
