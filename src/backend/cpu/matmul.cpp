#include "backend/cpu/matmul.h"

#include "base/check.h"
#include "quant/codec.h"

namespace millrace::cpu {
namespace {

Panel panel_for(const CpuWeight& w, const Rows& x) {
  if (!w.int8_activations()) {
    return {reinterpret_cast<const uint8_t*>(x.values), x.cols * static_cast<int64_t>(sizeof(float)),
            x.index};
  }
  return {reinterpret_cast<const uint8_t*>(x.blocks),
          x.cols / kQuantBlock * static_cast<int64_t>(sizeof(ActivationBlock)), x.index};
}

}  // namespace

void multiply(const KernelTable& kernels, const CpuWeight& w, int64_t expert, int64_t first, int64_t num_rows,
              const Rows& x, int64_t num_m, float* out, int64_t out_stride, float* scratch) {
  MILLRACE_CHECK(w.cols == x.cols && first + num_rows <= w.rows);
  const MatmulFn kernel = kernels.matmul[static_cast<int>(w.format)];
  const int64_t row = expert * w.rows + first;
  if (!w.decoded) {
    for (int64_t m = 0; m < num_m; m += kernels.pass_rows) {
      kernel(w.matrix, row, num_rows, panel_for(w, x.from(m)), std::min(kernels.pass_rows, num_m - m),
             out + m * out_stride, out_stride);
    }
    return;
  }
  const MatrixView opened{reinterpret_cast<const uint8_t*>(scratch),
                          w.cols * static_cast<int64_t>(sizeof(float)), nullptr, 0, w.cols};
  for (int64_t r = 0; r < num_rows; r += kDecodedRows) {
    const int64_t rows = std::min(kDecodedRows, num_rows - r);
    for (int64_t i = 0; i < rows; ++i) quant::dequantize_row(w.view, row + r + i, scratch + i * w.cols);
    kernel(opened, 0, rows, panel_for(w, x), num_m, out + r, out_stride);
  }
}

}  // namespace millrace::cpu
