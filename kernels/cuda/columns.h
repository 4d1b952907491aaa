// Columns of rows that ranks share: taken out of a matrix, and put together again from everybody's. Bits are
// copied, nothing is computed. Pointers are device memory; launches are asynchronous on the stream and take
// counts of zero. B = 4.3 TB/s, the measured copy of an H200.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.h"

namespace millrace::cuda {

inline constexpr int kMaxColumnParts = 16;

// Part p of `parts` has columns [bounds[p], bounds[p + 1]) of a row, which may be none.
struct ColumnParts {
  int32_t parts = 1;
  int64_t bounds[kMaxColumnParts + 1] = {};
  int64_t total() const { return bounds[parts]; }
};

// out[i, 0..width) = whole[i, first..first + width) of rows of `total`. Floor: 8 width * rows / B.
void launch_take_columns(const float* whole, int64_t total, int64_t first, int64_t width, int64_t rows,
                         float* out, const Launch& at);

// whole[rows, total] of parts that lie one behind the other, part p as [rows, its width] from
// parts + bounds[p] * rows on. Floor: 8 total * rows / B.
void launch_join_columns(const float* parts, const ColumnParts& cut, int64_t rows, float* whole,
                         const Launch& at);

}  // namespace millrace::cuda
