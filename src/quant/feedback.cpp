#include "quant/feedback.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "quant/codec.h"
#include "quant/encoder.h"

namespace millrace::quant {
namespace {

double dot(const float* a, const float* b, int64_t count) {
  constexpr int kLanes = 16;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l] += a[i + l] * b[i + l];
  }
  double sum = 0.0;
  for (; i < count; ++i) sum += static_cast<double>(a[i]) * b[i];
  for (const float lane : lanes) sum += lane;
  return sum;
}

void add_scaled(float* y, float scale, const float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] += scale * x[i];
}

// In place, upper triangle: A = R R', from the last column to the first. A is positive definite by its
// damping; a pivot that rounding has brought to nothing is lifted. On one thread: n^3 / 6 steps are less than
// the rows cost, and a column is too short to share.
void factorize(std::vector<float>& a, int64_t n) {
  for (int64_t j = n - 1; j >= 0; --j) {
    const float* row_j = &a[j * n] + j + 1;
    const int64_t known = n - 1 - j;
    const double pivot = std::sqrt(std::max(a[j * n + j] - dot(row_j, row_j, known), 1e-6));
    a[j * n + j] = static_cast<float>(pivot);
    for (int64_t i = 0; i < j; ++i) {
      a[i * n + j] = static_cast<float>((a[i * n + j] - dot(&a[i * n] + j + 1, row_j, known)) / pivot);
    }
  }
}

}  // namespace

ErrorFeedback::ErrorFeedback(std::span<const float> products, int64_t cols, int block, double damping,
                             const Parallel& parallel)
    : cols_(cols), block_(block), flow_(products.begin(), products.end()) {
  MILLRACE_CHECK(static_cast<int64_t>(products.size()) == cols * cols && cols % block == 0);
  double mean = 0.0;
  for (int64_t i = 0; i < cols; ++i) mean += flow_[i * cols + i] / static_cast<double>(cols);
  const auto scale = static_cast<float>(mean > 0.0 ? 1.0 / mean : 0.0);
  for (int64_t i = 0; i < cols; ++i) {
    for (int64_t j = i; j < cols; ++j) flow_[i * cols + j] *= scale;
    flow_[i * cols + i] += static_cast<float>(damping);
  }
  factorize(flow_, cols);
  for (int64_t j = 0; j < cols; ++j) weight_.push_back(flow_[j * cols + j] * flow_[j * cols + j]);
  // Row i of R_BR R_RR^-1: solve y R_RR = R_iR, column by column. Rows are independent, but R_RR is read: the
  // results go to a copy.
  std::vector<float> solved(flow_.size());
  parallel(cols, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t rest = (i / block_ + 1) * block_;
      float* y = &solved[i * cols];
      std::copy(&flow_[i * cols + rest], &flow_[i * cols] + cols, y + rest);
      for (int64_t k = rest; k < cols; ++k) {
        y[k] /= flow_[k * cols + k];
        add_scaled(y + k + 1, -y[k], &flow_[k * cols + k] + 1, cols - k - 1);
      }
    }
  });
  flow_ = std::move(solved);
}

void ErrorFeedback::encode_rows(DType type, float* x, int64_t num_rows, std::byte* out) const {
  MILLRACE_CHECK(info(type).block_elements == block_);
  const size_t block_bytes = static_cast<size_t>(info(type).block_bytes), row_bytes = bytes_of(type, cols_);
  std::vector<float> values(static_cast<size_t>(num_rows * block_)), back(values.size());
  std::vector<std::byte> coded(static_cast<size_t>(num_rows) * block_bytes);
  for (int64_t begin = 0; begin < cols_; begin += block_) {
    for (int64_t r = 0; r < num_rows; ++r) {
      std::copy_n(x + r * cols_ + begin, block_, &values[r * block_]);
    }
    quant::encode_rows(type, values.data(), num_rows, block_, weight_.data() + begin, coded.data());
    dequantize(type, coded.data(), back.data(), num_rows * block_);
    const int64_t rest = begin + block_;
    for (int64_t r = 0; r < num_rows; ++r) {
      std::memcpy(
          out + static_cast<size_t>(r) * row_bytes + static_cast<size_t>(begin / block_) * block_bytes,
          &coded[static_cast<size_t>(r) * block_bytes], block_bytes);
      for (int64_t j = 0; j < block_; ++j) {
        add_scaled(x + r * cols_ + rest, values[r * block_ + j] - back[r * block_ + j],
                   &flow_[(begin + j) * cols_] + rest, cols_ - rest);
      }
    }
  }
}

}  // namespace millrace::quant
