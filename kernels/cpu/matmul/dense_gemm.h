// Products of plain matrices (millrace/kernels/gemm.h) over the device's threads: forward and gradients of
// training.
#pragma once

#include "kernels/cpu/context.h"
#include "millrace/kernels/gemm.h"

namespace millrace::cpu {

size_t dense_gemm_workspace_bytes(const mr_gemm_args& args, int threads);
// The arguments were checked, strides of 0 replaced.
void dense_gemm(const Context& on, const mr_gemm_args& args, void* workspace);
inline constexpr int64_t kDenseDepth = 256;  // of k at a time
// c += the product. c is float32; no scales, bias, activation, residual; alpha is 1. Every kDenseDepth of k
// are summed and then added to c, so that a product over k cut at multiples of it has the bits of one call.
void dense_gemm_add(const Context& on, const mr_gemm_args& args, void* workspace);

}  // namespace millrace::cpu
