#include "kernels/cpu/matmul/gemm_chunk.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/quant/codec.h"

namespace millrace::cpu {
namespace {

struct KernelAndInput {
  MatmulFn kernel;
  Panel panel;
};

// The kernel for the weights' format, and the activations that it reads: of a format with two kernels, those
// that were made.
KernelAndInput kernel_for(const KernelTable& kernels, Format format, const ActivationRows& x) {
  const auto at = static_cast<int>(format);
  const auto bytes = [](const auto* p) { return reinterpret_cast<const uint8_t*>(p); };
  const int64_t block_bytes = x.cols / kQuantBlock * static_cast<int64_t>(sizeof(ActivationBlock));
  if (format <= Format::kBF16) {
    return {kernels.matmul[at], {bytes(x.values), x.stride * static_cast<int64_t>(sizeof(float)), x.index}};
  }
  if (kernels.bf16_tile_matmul[at] == nullptr) {
    if (x.int8_tiles != nullptr) {
      return {kernels.int8_tile_matmul[at], {bytes(x.int8_tiles), block_bytes, nullptr}};
    }
    return {kernels.matmul[at], {bytes(x.blocks), block_bytes, x.index}};
  }
  if (x.bf16_tiles == nullptr) return {kernels.matmul[at], {bytes(x.pow2_blocks), block_bytes, x.index}};
  return {kernels.bf16_tile_matmul[at],
          {bytes(x.bf16_tiles), x.cols * static_cast<int64_t>(sizeof(uint16_t)), nullptr, {}, x.tile_height}};
}

}  // namespace

void gemm_chunk(const KernelTable& kernels, const WeightChunk& w, const ActivationRows& x, int64_t num_m,
                float* out, int64_t out_stride, float* dequantized, const PrefetchHint& prefetch) {
  const WeightMatrix& matrix = w.matrix;
  MILLRACE_CHECK(matrix.cols == x.cols && w.first + w.count <= matrix.rows);
  const int64_t row = w.expert * matrix.expert_rows + w.first;
  if (!matrix.dequantized) {
    for (int64_t m = 0; m < num_m; m += kernels.rows_per_pass) {
      auto [kernel, panel] = kernel_for(kernels, matrix.format, x.from(m));
      panel.prefetch = prefetch;
      kernel(matrix.matrix, row, w.count, panel, std::min(kernels.rows_per_pass, num_m - m),
             out + m * out_stride, out_stride);
    }
    return;
  }
  const auto [kernel, panel] = kernel_for(kernels, matrix.format, x);
  const MatrixView rows_of_float{reinterpret_cast<const uint8_t*>(dequantized),
                                 matrix.cols * static_cast<int64_t>(sizeof(float)), nullptr, 0, matrix.cols};
  for (int64_t r = 0; r < w.count; r += kDequantizedRows) {
    const int64_t rows = std::min(kDequantizedRows, w.count - r);
    for (int64_t i = 0; i < rows; ++i) {
      quant::dequantize_row(matrix.view, w.expert * matrix.rows + w.first + r + i,
                            dequantized + i * matrix.cols);
    }
    kernel(rows_of_float, 0, rows, panel, num_m, out + r, out_stride);
  }
}

}  // namespace millrace::cpu
