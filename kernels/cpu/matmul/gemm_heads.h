// A product per head, y_h = W_h x_h: the matrices of latent attention, [heads, out, in], each of which
// multiplies its own part of every row.
#pragma once

#include "kernels/cpu/matmul/gemm_chunk.h"

namespace millrace::cpu {

struct GemmHeads {
  LinearWeights weights;  // [heads, out, in]; without biases
  const float* x;         // row m of head h: x + m * x_stride + h * x_head_stride, [in]
  int64_t x_stride, x_head_stride;
  float* out;  // the same of [out]
  int64_t out_stride, out_head_stride;
  int64_t rows;
};

// Elements of `quantized` that a call needs, as take_quantized counts them: rows of `in` columns.
int64_t gemm_heads_rows(int64_t heads, int64_t rows);

// ctx has scratch; quantized: take_quantized of gemm_heads_rows() rows of `in`.
void gemm_heads(const Context& ctx, const GemmHeads& op, const QuantizedActivations& quantized);

}  // namespace millrace::cpu
