// Products with weights of every type, plainly: rows are dequantized one at a time and summed in double.
#pragma once

#include <cstdint>

#include "kernels/quant/fp8_patches.h"
#include "tensor/tensor_view.h"

namespace millrace::reference {

struct LinearWeights {
  const TensorView* matrix = nullptr;  // [out, in], or [experts, out, in]
  const float* bias = nullptr;         // [out] or [experts, out], or absent
};

// Rows of one expert's matrix.
int64_t out_rows(const LinearWeights& weights);

// y [count][out] = x [count][in] W^T + b, for expert `expert` of W (0 of a plain matrix).
void linear(const LinearWeights& weights, int64_t expert, const float* x, int64_t count, float* y);

// The same as FP8 prompts are multiplied: x rounded to codes, the products of every 128 columns summed in
// float32, multiplied by both scales and added to the total in order.
void fp8_linear(const quant::Fp8Patches& w, const float* bias, const float* x, int64_t count, float* y);

}  // namespace millrace::reference
