// The dense warpgroup kernels of one type each (dense_bf16.cu, dense_f16.cu, dense_s8.cu), by DenseGemm::tile
// from 1 on.
#pragma once

#include "kernels/cuda/gemm/dense.h"

namespace millrace::cuda {

void launch_dense_bf16(const DenseGemm& op, int tile, const Launch& at);
void launch_dense_f16(const DenseGemm& op, int tile, const Launch& at);
void launch_dense_s8(const DenseGemm& op, int tile, const Launch& at);

}  // namespace millrace::cuda
