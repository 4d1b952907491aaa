// The fused operations of the C API as launches (docs/kernels/fused.md). Arguments are those of
// include/millrace/kernels, checked: strides are filled in and there is at least one row, unless a line says
// otherwise. All of them but the last are bound by memory; the number of blocks that sums over rows are cut
// into follows from the shape alone, so that their bits do not depend on the GPU's size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.h"
#include "millrace/kernels.h"

namespace millrace::cuda {

void launch_norm(const mr_norm_args& args, const Launch& at);

// Of no rows too. partials: [norm_backward_blocks][2][cols] float32.
int64_t norm_backward_blocks(int64_t rows, int64_t cols);
void launch_norm_backward(const mr_norm_backward_args& args, float* partials, const Launch& at);

void launch_rotary_rows(const mr_rotary_args& args, const Launch& at);
void launch_activation(const mr_activation_args& args, const Launch& at);
void launch_activation_backward(const mr_activation_backward_args& args, const Launch& at);
void launch_softmax(const mr_softmax_args& args, const Launch& at);
void launch_softmax_backward(const mr_softmax_backward_args& args, const Launch& at);
void launch_cross_entropy(const mr_cross_entropy_args& args, const Launch& at);
void launch_cross_entropy_backward(const mr_cross_entropy_backward_args& args, const Launch& at);
void launch_embedding(const mr_embedding_args& args, const Launch& at);
void launch_dropout(const mr_dropout_args& args, const Launch& at);

// Of no rows too.
size_t embedding_backward_workspace_bytes(int64_t rows, int64_t vocab);
void launch_embedding_backward(const mr_embedding_backward_args& args, void* workspace, const Launch& at);

// Of no rows too; chunks are filled in.
size_t linear_cross_entropy_backward_bytes(const mr_linear_cross_entropy_backward_args& args);
void launch_linear_cross_entropy_backward(const mr_linear_cross_entropy_backward_args& args, void* workspace,
                                          const Launch& at);

}  // namespace millrace::cuda
