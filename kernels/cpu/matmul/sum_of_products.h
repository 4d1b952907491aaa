// A product whose weights are the sum of two: both are multiplied over all columns, then added, a tile of
// rows at a time, so that the second reads what the first has left in the cache. For Q2_K, whose minimums
// change every 16 elements, where ActivationBlock has a sum over 32.
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/target.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

template <MatmulFn kFirst, MatmulFn kSecond>
void sum_of_products(const MatrixView& w, int64_t first, int64_t num_rows, const Panel& x, int64_t num_m,
                     float* out, int64_t out_stride) {
  constexpr int64_t kRows = 64, kM = 64;  // a tile of 16 KiB on the stack
  alignas(64) float second[kM * kRows];
  for (int64_t m = 0; m < num_m; m += kM) {
    const int64_t count = num_m - m < kM ? num_m - m : kM;
    Panel part = x;
    if (x.index != nullptr) {
      part.index += m;
    } else {
      part.data += m * x.row_bytes;
    }
    for (int64_t r = 0; r < num_rows; r += kRows) {
      const int64_t rows = num_rows - r < kRows ? num_rows - r : kRows;
      float* to = out + m * out_stride + r;
      kFirst(w, first + r, rows, part, count, to, out_stride);
      kSecond(w, first + r, rows, part, count, second, kRows);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t j = 0; j < rows; ++j) to[i * out_stride + j] += second[i * kRows + j];
      }
    }
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
