// Linear attention over ragged sequences of tensors: the C API's (millrace/kernels/linear_attention.h), whose
// arguments were checked. Sequences and heads are shared out over threads; a sequence's chunks follow one
// another.
#pragma once

#include "kernels/cpu/context.h"
#include "millrace/kernels/linear_attention.h"

namespace millrace::cpu {

size_t linear_attention_workspace_bytes(int32_t key_dim, int32_t value_dim, int threads);
void gated_delta(const Context& ctx, const mr_gated_delta_args& args, void* workspace);
void selective_scan(const Context& ctx, const mr_selective_scan_args& args, void* workspace);
void short_conv(const Context& ctx, const mr_short_conv_args& args);

}  // namespace millrace::cpu
