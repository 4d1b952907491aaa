// What happens to the sums of a dense product (gemm/dense.h) before they are stored, the same in every
// kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/gemm/dense.h"

namespace millrace::cuda {

__device__ inline float dense_activate(float x, DenseActivation activation) {
  if (activation == DenseActivation::kNone) return x;
  if (activation == DenseActivation::kGelu) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  // (1 + tanh(z)) / 2 = 1 / (1 + e^(-2z)): GELU by tanh and SiLU are one function of different arguments.
  const float z = activation == DenseActivation::kSilu ? x : 1.5957691f * fmaf(0.044715f * x * x, x, x);
  return __fdividef(x, 1.0f + __expf(-z));
}

__device__ inline float load_out(const void* from, int64_t at, DenseOut type) {
  if (type == DenseOut::kF32) return static_cast<const float*>(from)[at];
  if (type == DenseOut::kBf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[at]);
  return __half2float(static_cast<const __half*>(from)[at]);
}

// The output of row `row`, column `column`, both inside.
__device__ inline float dense_output(const DenseEpilogue& e, float sum, int64_t row, int64_t column) {
  float y = e.alpha * sum;
  if (e.row_scales != nullptr) y *= e.row_scales[row];
  if (e.column_scales != nullptr) y *= e.column_scales[column];
  if (e.bias != nullptr) y += e.bias[column];
  y = dense_activate(y, e.activation);
  if (e.residual != nullptr) y += load_out(e.residual, row * e.residual_stride + column, e.out);
  return y;
}

}  // namespace millrace::cuda
