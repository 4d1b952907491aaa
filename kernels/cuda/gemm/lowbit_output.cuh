// How sums of products with four-bit weights become outputs, the same in every kernel.
#pragma once

#include "kernels/cuda/gemm/dense_epilogue.cuh"
#include "kernels/cuda/gemm/lowbit.h"

namespace millrace::cuda {

__device__ inline void store_out(void* to, int64_t at, DenseOut type, float y) {
  if (type == DenseOut::kF32) static_cast<float*>(to)[at] = y;
  if (type == DenseOut::kBf16) static_cast<__nv_bfloat16*>(to)[at] = __float2bfloat16_rn(y);
  if (type == DenseOut::kF16) static_cast<__half*>(to)[at] = __float2half_rn(y);
}

// sum: unscaled; output `output` of row `row`.
__device__ inline void store_lowbit(const LowbitGemm& op, float sum, int expert, int64_t row,
                                    int64_t output) {
  const float scale = op.expert_scales != nullptr ? op.alpha * op.expert_scales[expert] : op.alpha;
  const float bias = op.bias != nullptr ? op.bias[expert * op.outputs() + output] : 0.0f;
  store_out(op.y, row * op.ldy + output, op.out, fmaf(sum, scale, bias));
}

}  // namespace millrace::cuda
