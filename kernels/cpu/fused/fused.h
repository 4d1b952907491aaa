// The fused operations of the C API over all threads of a CPU (docs/kernels/fused.md). Arguments are those of
// include/millrace/kernels, checked: strides are filled in and there is at least one row, unless a line says
// otherwise. Who computes a row never changes its bits; sums over rows are cut into blocks by the number of
// rows alone.
#pragma once

#include "kernels/cpu/context.h"
#include "millrace/kernels.h"

namespace millrace::cpu {

void norm_rows_fused(const Context& ctx, const mr_norm_args& args);
// Of no rows too. Workspace: norm_backward_bytes.
size_t norm_backward_bytes(const mr_norm_backward_args& args);
void norm_rows_backward(const Context& ctx, const mr_norm_backward_args& args, void* workspace);

void rotary_rows_fused(const Context& ctx, const mr_rotary_args& args);
void activation_rows(const Context& ctx, const mr_activation_args& args);
void activation_rows_backward(const Context& ctx, const mr_activation_backward_args& args);
void softmax_rows(const Context& ctx, const mr_softmax_args& args);
void softmax_rows_backward(const Context& ctx, const mr_softmax_backward_args& args);
void dropout_rows(const Context& ctx, const mr_dropout_args& args);

// Error{kBadInput} for a target or token outside, before anything is written.
void cross_entropy_rows(const Context& ctx, const mr_cross_entropy_args& args);
void cross_entropy_rows_backward(const Context& ctx, const mr_cross_entropy_backward_args& args);
void embedding_rows(const Context& ctx, const mr_embedding_args& args);
// Of no rows too. Workspace: embedding_backward_bytes.
size_t embedding_backward_bytes(const mr_embedding_backward_args& args);
void embedding_rows_backward(const Context& ctx, const mr_embedding_backward_args& args, void* workspace);

}  // namespace millrace::cpu
