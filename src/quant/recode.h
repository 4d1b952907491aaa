// From a stored tensor to the same tensor in another type, some rows at a time, with the error that costs.
#pragma once

#include <cstdint>

#include "tensor/tensor_view.h"

namespace millrace::quant {

class ErrorFeedback;  // feedback.h: errors then flow along each row

// Sums of squares over weights, plain or weighted by their column's importance.
struct RecodeError {
  double error = 0.0, total = 0.0;
  RecodeError& operator+=(const RecodeError& other) {
    error += other.error;
    total += other.total;
    return *this;
  }
  double relative_rms() const;  // sqrt(error / total)
};

// The order rows are written in. GGUF's llama files want the two halves of each head of q and k interleaved:
// rows (2 i, 2 i + 1) there are rows (i, i + head_dim / 2) of a Hugging Face file.
struct RowOrder {
  int64_t head_dim = 0;  // 0: as they come
  int64_t source(int64_t row) const {
    if (head_dim == 0) return row;
    const int64_t in_head = row % head_dim;
    return row - in_head + in_head / 2 + in_head % 2 * (head_dim / 2);
  }
};

// Rows [first, first + count) of `view` (in `order`) as `type`, one after the other, into `out`. Bytes are
// copied where the type is the same. `importance` [cols] or absent: what the encoder weighs, and the error
// with it. Throws Error{kBadInput} naming tensor and row for a value that is not finite.
RecodeError recode_rows(const TensorView& view, int64_t first, int64_t count, DType type,
                        const float* importance, const RowOrder& order, std::byte* out,
                        const ErrorFeedback* feedback = nullptr);

// Rows for a thread to take at a time: some tenth of a millisecond's work or more.
int64_t recode_chunk(int64_t cols);

}  // namespace millrace::quant
