#include "quant/feedback.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "kernels/cpu/quant/encoder.h"
#include "kernels/quant/blocks.h"
#include "kernels/quant/codec.h"

namespace millrace::quant {
namespace {

// A sample of a thousand tokens shows too few of a matrix's input directions to trust it further: on SmolLM2
// at 4.5 bits 0.03 and 0.3 both cost more perplexity.
constexpr double kDamping = 0.1;

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

// The sixteen values a block of 32 can hold once its scale is chosen.
struct FourBitLevels {
  float value[16];
  bool even = true;  // all steps alike
  uint8_t* nibbles = nullptr;

  void open(DType type, std::byte* block) {
    const auto bytes = static_cast<size_t>(info(type).block_bytes);
    std::byte all[sizeof(BlockQ4_1)];  // the largest of them
    std::memcpy(all, block, bytes);
    nibbles = reinterpret_cast<uint8_t*>(block) + bytes - kBlock / 2;
    for (size_t c = 0; c < 16; ++c) all[bytes - 16 + c] = static_cast<std::byte>(c);
    float values[kBlock];
    dequantize(type, all, values, kBlock);
    std::copy_n(values, 16, value);
    even = type != DType::kMXFP4 && type != DType::kIQ4_NL;
  }

  uint8_t nearest(float x) const {
    if (even) {
      const float step = value[1] - value[0];
      const float code = step == 0.0f ? 0.0f : std::nearbyint((x - value[0]) / step);
      return static_cast<uint8_t>(std::clamp(code, 0.0f, 15.0f));
    }
    uint8_t best = 0;
    for (uint8_t c = 1; c < 16; ++c) {
      if (std::fabs(x - value[c]) < std::fabs(x - value[best])) best = c;
    }
    return best;
  }

  void pack(const uint8_t* codes) const {
    for (int j = 0; j < 16; ++j) nibbles[j] = static_cast<uint8_t>(codes[j] | codes[j + 16] << 4);
  }
};

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
  // Row i of R_iR R_RR^-1: solve y R_RR = R_iR, column by column. Rows are independent, but R_RR is read: the
  // results go to a copy.
  std::vector<float> solved(flow_.size());
  parallel(cols, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* y = &solved[i * cols];
      std::copy(&flow_[i * cols + i] + 1, &flow_[i * cols] + cols, y + i + 1);
      for (int64_t k = i + 1; k < cols; ++k) {
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
    for (int64_t r = 0; r < num_rows; ++r) {
      std::byte* const block = &coded[static_cast<size_t>(r) * block_bytes];
      round_in_order(type, block, begin, &values[r * block_], &back[r * block_]);
      std::memcpy(
          out + static_cast<size_t>(r) * row_bytes + static_cast<size_t>(begin / block_) * block_bytes, block,
          block_bytes);
      const int64_t rest = begin + block_;
      for (int64_t j = 0; j < block_; ++j) {
        add_scaled(x + r * cols_ + rest, values[r * block_ + j] - back[r * block_ + j],
                   &flow_[(begin + j) * cols_] + rest, cols_ - rest);
      }
    }
  }
}

// One block: each value is rounded once the errors before it have reached it. Types whose codes are not four
// bits at the end of a block of 32 keep the codes they have, and the errors alone are passed on.
void ErrorFeedback::round_in_order(DType type, std::byte* block, int64_t begin, float* values,
                                   float* back) const {
  const bool four_bits = type == DType::kQ4_0 || type == DType::kQ4_1 || type == DType::kQ4_Z ||
                         type == DType::kMXFP4 || type == DType::kIQ4_NL;
  FourBitLevels levels;
  if (four_bits) levels.open(type, block);
  uint8_t codes[kBlock] = {};
  for (int64_t j = 0; j < block_; ++j) {
    if (four_bits) {
      codes[j] = levels.nearest(values[j]);
      back[j] = levels.value[codes[j]];
    }
    const int64_t left = block_ - j - 1;
    add_scaled(values + j + 1, values[j] - back[j], &flow_[(begin + j) * cols_ + begin + j] + 1, left);
  }
  if (four_bits) levels.pack(codes);
}

const ErrorFeedback* FeedbackCache::of(DType type, int64_t cols, const MatrixInputs& inputs,
                                       const ErrorFeedback::Parallel& parallel) {
  const int block = info(type).block_elements;
  if (!inputs.products || block == 1) return nullptr;
  if (products_ != inputs.products || block_ != block) {
    feedback_ = std::make_unique<ErrorFeedback>(*inputs.products, cols, block, kDamping, parallel);
    products_ = inputs.products;
    block_ = block;
  }
  return feedback_.get();
}

}  // namespace millrace::quant
