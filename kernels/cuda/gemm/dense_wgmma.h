// The dense warpgroup kernels of one type each (dense_bf16.cu, dense_f16.cu, dense_s8.cu), by DenseGemm::tile
// from 1 on.
#pragma once

#include "kernels/cuda/gemm/dense.h"

namespace millrace::cuda {

void launch_dense_bf16(const DenseGemm& op, int tile, const Launch& at);
void launch_dense_f16(const DenseGemm& op, int tile, const Launch& at);
void launch_dense_s8(const DenseGemm& op, int tile, const Launch& at);
// K in `parts` parts, tiles of 128 x 192 (wide) or 64 x 128; false where there is no such kernel.
bool launch_dense_split_bf16(const DenseGemm& op, bool wide, int parts, const Launch& at);
bool launch_dense_split_f16(const DenseGemm& op, bool wide, int parts, const Launch& at);

}  // namespace millrace::cuda
