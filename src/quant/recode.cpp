#include "quant/recode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "quant/codec.h"
#include "quant/encoder.h"
#include "quant/feedback.h"

namespace millrace::quant {
namespace {

// Sixteen partial sums: one chain of additions would take longer than the encoding.
RecodeError compare(const float* x, const float* y, const float* importance, int64_t count) {
  constexpr int kLanes = 16;
  float error[kLanes] = {}, total[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const float w = importance == nullptr ? 1.0f : importance[i + l];
      const float off = x[i + l] - y[i + l];
      error[l] += w * off * off;
      total[l] += w * x[i + l] * x[i + l];
    }
  }
  RecodeError sum;
  for (; i < count; ++i) {
    const double w = importance == nullptr ? 1.0 : importance[i], off = x[i] - y[i];
    sum.error += w * off * off;
    sum.total += w * x[i] * x[i];
  }
  for (int l = 0; l < kLanes; ++l) {
    sum.error += error[l];
    sum.total += total[l];
  }
  return sum;
}

}  // namespace

double RecodeError::relative_rms() const { return total > 0.0 ? std::sqrt(error / total) : 0.0; }

int64_t recode_chunk(int64_t cols) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, cols)); }

RecodeError recode_rows(const TensorView& view, int64_t first, int64_t count, DType type,
                        const float* importance, const RowOrder& order, std::byte* out,
                        const ErrorFeedback* feedback) {
  const int64_t cols = view.cols();
  const size_t row_bytes = bytes_of(type, cols);
  if (view.type == type) {
    const bool plain = info(type).block_elements == 1;
    std::vector<float> values(static_cast<size_t>(plain ? cols : 0));
    for (int64_t r = 0; r < count; ++r, out += row_bytes) {
      if (plain) dequantize_row(view, order.source(first + r), values.data());
      if (!scales_are_finite(view, order.source(first + r)) || !all_finite(values.data(), plain ? cols : 0)) {
        throw_error(ErrorCode::kBadInput, "tensor {}: row {}: found NaN or infinity, expected finite values",
                    view.name, first + r);
      }
      std::memcpy(out, view.row(order.source(first + r)), row_bytes);
    }
    return {};
  }
  const int64_t chunk = recode_chunk(cols);
  std::vector<float> values(static_cast<size_t>(chunk * cols)), back(static_cast<size_t>(cols));
  std::vector<float> changed;  // what feedback makes of the values
  RecodeError sum;
  for (int64_t done = 0; done < count; done += chunk) {
    const int64_t rows = std::min(chunk, count - done);
    for (int64_t r = 0; r < rows; ++r) {
      float* row = values.data() + r * cols;
      dequantize_row(view, order.source(first + done + r), row);
      if (!all_finite(row, cols)) {
        throw_error(ErrorCode::kBadInput, "tensor {}: row {}: found NaN or infinity, expected finite values",
                    view.name, first + done + r);
      }
    }
    if (feedback != nullptr) {
      changed = values;
      feedback->encode_rows(type, changed.data(), rows, out);
    } else {
      encode_rows(type, values.data(), rows, cols, importance, out);
    }
    for (int64_t r = 0; r < rows; ++r, out += row_bytes) {
      dequantize(type, out, back.data(), cols);
      sum += compare(values.data() + r * cols, back.data(), importance, cols);
    }
  }
  return sum;
}

}  // namespace millrace::quant
