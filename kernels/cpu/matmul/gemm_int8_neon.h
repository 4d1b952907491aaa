// Matrix products of block-quantized weights with int8 activations where ARM has the dot product instruction:
// GEMV for few rows of activations, GEMM for many, the same numbers (tables/kernel_table.h).
#pragma once

#include <stdint.h>

#include "kernels/cpu/matmul/gemm_neon.h"
#include "kernels/cpu/matmul/gemv_neon.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

template <class Format>
void quantized_matmul(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                      float* out, int64_t out_stride) {
  int64_t m = 0;
  if (num_m >= kMinGemmRows) {
    gemm<Format>(w, first, num_rows, x, num_m, out, out_stride);
    return;
  }
  for (; m + 8 <= num_m; m += 8) gemv_chunk<Format, 8>(w, first, num_rows, x, m, out, out_stride);
  for (; m + 4 <= num_m; m += 4) gemv_chunk<Format, 4>(w, first, num_rows, x, m, out, out_stride);
  for (; m + 2 <= num_m; m += 2) gemv_chunk<Format, 2>(w, first, num_rows, x, m, out, out_stride);
  if (m < num_m) gemv_chunk<Format, 1>(w, first, num_rows, x, m, out, out_stride);
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
