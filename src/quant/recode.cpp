#include "quant/recode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "kernels/cpu/quant/encoder.h"
#include "kernels/quant/codec.h"
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

int64_t recode_chunk(int64_t cols) { return std::max<int64_t>(1, 65536 / std::max<int64_t>(1, cols)); }

namespace {

// Values of a row as float32. Throws for what is not finite.
void read_row(const TensorView& view, int64_t row, int64_t named, float* out) {
  const bool beside = view.type == DType::kMXFP4Split || view.type == DType::kF8E4M3 ||
                      view.scales.data != nullptr;  // scales in a tensor of their own
  bool finite;
  if (beside) {
    dequantize_row(view, row, out);
    finite = all_finite(out, view.cols());
  } else {
    finite = widen(view.type, view.row(row), view.cols(), out);
  }
  if (!finite) {
    throw_error(ErrorCode::kBadInput, "tensor {}: row {}: found NaN or infinity, expected finite values",
                view.name, named);
  }
}

void copy_rows(const TensorView& view, int64_t first, int64_t count, const RowOrder& order, std::byte* out) {
  const size_t row_bytes = bytes_of(view.type, view.cols());
  const bool plain = info(view.type).block_elements == 1;
  std::vector<float> values(static_cast<size_t>(plain ? view.cols() : 0));
  for (int64_t r = 0; r < count; ++r, out += row_bytes) {
    const int64_t row = order.source(first + r);
    if (plain) {
      read_row(view, row, first + r, values.data());
    } else if (!scales_are_finite(view, row)) {
      throw_error(ErrorCode::kBadInput, "tensor {}: row {}: found NaN or infinity, expected finite values",
                  view.name, first + r);
    }
    std::memcpy(out, view.row(row), row_bytes);
  }
}

}  // namespace

RecodeError recode_rows(const TensorView& view, int64_t first, int64_t count, DType type,
                        const float* importance, const RowOrder& order, std::byte* out,
                        const ErrorFeedback* feedback) {
  if (view.type == type && view.scales.data == nullptr) {
    copy_rows(view, first, count, order, out);
    return {};
  }
  const int64_t cols = view.cols();
  const size_t row_bytes = bytes_of(type, cols);
  // Values stay in the first-level cache between the passes over them.
  const int64_t chunk = std::max<int64_t>(1, 4096 / cols);
  std::vector<float> values(static_cast<size_t>(chunk * cols)), back, changed;
  RecodeError sum;
  for (int64_t done = 0; done < count; done += chunk) {
    const int64_t rows = std::min(chunk, count - done);
    for (int64_t r = 0; r < rows; ++r) {
      read_row(view, order.source(first + done + r), first + done + r, values.data() + r * cols);
    }
    if (importance == nullptr && feedback == nullptr) {
      if (const auto error = encode_alike(type, values.data(), rows * cols, out)) {
        sum += {error->error, error->total};
        out += static_cast<size_t>(rows) * row_bytes;
        continue;
      }
    }
    if (feedback != nullptr) {
      changed = values;  // what feedback makes of the values
      feedback->encode_rows(type, changed.data(), rows, out);
    } else {
      encode_rows(type, values.data(), rows, cols, importance, out);
    }
    back.resize(static_cast<size_t>(cols));
    for (int64_t r = 0; r < rows; ++r, out += row_bytes) {
      dequantize(type, out, back.data(), cols);
      sum += compare(values.data() + r * cols, back.data(), importance, cols);
    }
  }
  return sum;
}

}  // namespace millrace::quant
