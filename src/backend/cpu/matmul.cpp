#include "backend/cpu/matmul.h"

#include "base/check.h"
#include "kernels/quant/codec.h"

namespace millrace::cpu {
namespace {

struct Chosen {
  MatmulFn kernel;
  Panel panel;
};

// The kernel for the weight's format, and the form of the activations that it reads: of a format with two,
// the one that was made.
Chosen choose(const KernelTable& kernels, Format format, const Rows& x) {
  const auto at = static_cast<int>(format);
  const auto bytes = [](const auto* p) { return reinterpret_cast<const uint8_t*>(p); };
  const int64_t block_bytes = x.cols / kQuantBlock * static_cast<int64_t>(sizeof(ActivationBlock));
  if (format <= Format::kBF16) {
    return {kernels.matmul[at], {bytes(x.values), x.cols * static_cast<int64_t>(sizeof(float)), x.index}};
  }
  if (kernels.bf16_tile_matmul[at] == nullptr) {
    if (x.cells != nullptr) return {kernels.int8_tile_matmul[at], {bytes(x.cells), block_bytes, nullptr}};
    return {kernels.matmul[at], {bytes(x.blocks), block_bytes, x.index}};
  }
  if (x.tiles == nullptr) return {kernels.matmul[at], {bytes(x.binary), block_bytes, x.index}};
  return {kernels.bf16_tile_matmul[at],
          {bytes(x.tiles), x.cols * static_cast<int64_t>(sizeof(uint16_t)), nullptr, {}, x.height}};
}

}  // namespace

void multiply(const KernelTable& kernels, const CpuWeight& w, int64_t expert, int64_t first, int64_t num_rows,
              const Rows& x, int64_t num_m, float* out, int64_t out_stride, float* scratch,
              const PrefetchHint& chain) {
  MILLRACE_CHECK(w.cols == x.cols && first + num_rows <= w.rows);
  const int64_t row = expert * w.rows + first;
  if (!w.decoded) {
    for (int64_t m = 0; m < num_m; m += kernels.rows_per_pass) {
      auto [kernel, panel] = choose(kernels, w.format, x.from(m));
      panel.prefetch = chain;
      kernel(w.matrix, row, num_rows, panel, std::min(kernels.rows_per_pass, num_m - m), out + m * out_stride,
             out_stride);
    }
    return;
  }
  const auto [kernel, panel] = choose(kernels, w.format, x);
  const MatrixView opened{reinterpret_cast<const uint8_t*>(scratch),
                          w.cols * static_cast<int64_t>(sizeof(float)), nullptr, 0, w.cols};
  for (int64_t r = 0; r < num_rows; r += kDecodedRows) {
    const int64_t rows = std::min(kDecodedRows, num_rows - r);
    for (int64_t i = 0; i < rows; ++i) quant::dequantize_row(w.view, row + r + i, scratch + i * w.cols);
    kernel(opened, 0, rows, panel, num_m, out + r, out_stride);
  }
}

}  // namespace millrace::cpu
