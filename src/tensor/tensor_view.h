// TensorView: a non-owning look at a tensor where it lies (in a mapped file, in a buffer). Row-major,
// slowest dimension first: a weight of a linear layer is [out, in], experts are [experts, out, in].
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "tensor/dtype.h"

namespace millrace {

// Scales that lie beside the values rather than in the blocks.
//   kMXFP4Split: one e8m0 byte (kU8) per 32 elements, [.., out, in / 32]
//   kF8E4M3:     a grid of kF32 or kBF16, one per rows_per_scale x cols_per_scale patch ([1, 1]: per tensor)
struct ScaleGrid {
  const std::byte* data = nullptr;
  DType type = DType::kU8;
  int64_t rows_per_scale = 1;
  int64_t cols_per_scale = 32;
  int64_t scales_per_row = 0;  // distance, in scales, between two rows of the grid
  int64_t first_row = 0;       // of the grid's tensor, that the view begins with
};

struct TensorView {
  std::string name;  // as in the file, for messages
  DType type = DType::kF32;
  int rank = 0;
  std::array<int64_t, 4> shape{1, 1, 1, 1};  // shape[0..rank)
  const std::byte* data = nullptr;
  int64_t row_stride_bytes = 0;  // between two rows of the last dimension
  ScaleGrid scales;
  // Of a part of each of several matrices (rank 3): rows of the data from one matrix to the next; 0:
  // shape[1].
  int64_t matrix_rows = 0;

  int64_t cols() const { return rank == 0 ? 1 : shape[rank - 1]; }
  int64_t rows() const { return elements() / (cols() == 0 ? 1 : cols()); }
  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
  // Which row of the data row r of the view is.
  int64_t data_row(int64_t r) const {
    return matrix_rows == 0 ? r : r / shape[rank - 2] * matrix_rows + r % shape[rank - 2];
  }
  const std::byte* row(int64_t r) const { return data + data_row(r) * row_stride_bytes; }
  size_t bytes() const { return static_cast<size_t>(rows()) * bytes_of(type, cols()); }
};

}  // namespace millrace
