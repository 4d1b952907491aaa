#include "quant/feedback.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

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

// Types of four bits whose codes are the last bytes of a block.
bool ends_in_nibbles(DType type) {
  return type == DType::kQ4_0 || type == DType::kQ4_1 || type == DType::kQ4_Z || type == DType::kMXFP4 ||
         type == DType::kIQ4_NL || type == DType::kIQ4_XS || type == DType::kQ4_K;
}

// The sixteen values that each sub-block of 32 can hold once a block's scales are chosen.
class FourBitLevels {
 public:
  FourBitLevels(DType type, std::byte* block)
      : subs_(info(type).block_elements / kBlock),
        in_pairs_(type == DType::kQ4_K),
        even_(type != DType::kMXFP4 && type != DType::kIQ4_NL && type != DType::kIQ4_XS) {
    const auto bytes = static_cast<size_t>(info(type).block_bytes), codes = static_cast<size_t>(16 * subs_);
    nibbles_ = reinterpret_cast<uint8_t*>(block) + bytes - codes;
    std::byte all[sizeof(BlockQ4_K)];  // the largest of them
    std::memcpy(all, block, bytes);
    // Element c of each sub-block gets the code c.
    for (size_t i = 0; i < codes; ++i) all[bytes - codes + i] = static_cast<std::byte>(i % 16 * 17);
    dequantize(type, all, values_, info(type).block_elements);
  }

  uint8_t nearest(int sub, float x) const {
    const float* value = values_ + kBlock * sub;
    if (even_) {
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
  float value(int sub, uint8_t code) const { return values_[kBlock * sub + code]; }

  // A code for each element.
  void pack(const uint8_t* codes) const {
    const int half =
        in_pairs_ ? kBlock : kBlock / 2;  // elements in the low nibbles, then as many in the high
    for (int i = 0; i < 16 * subs_; ++i) {
      const uint8_t* pair = codes + i / half * 2 * half + i % half;
      nibbles_[i] = static_cast<uint8_t>(pair[0] | pair[half] << 4);
    }
  }

 private:
  int subs_;
  bool in_pairs_;  // a byte has an element of one sub-block and of the next
  bool even_;      // all steps alike
  uint8_t* nibbles_;
  float values_[kSuperBlock];
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

// One block: each value is rounded once the errors before it have reached it. Types of other than four bits
// keep the codes they have, and the errors alone are passed on.
void ErrorFeedback::round_in_order(DType type, std::byte* block, int64_t begin, float* values,
                                   float* back) const {
  std::optional<FourBitLevels> levels;
  if (ends_in_nibbles(type)) levels.emplace(type, block);
  uint8_t codes[kSuperBlock] = {};
  for (int64_t j = 0; j < block_; ++j) {
    if (levels) {
      const int sub = static_cast<int>(j / kBlock);
      codes[j] = levels->nearest(sub, values[j]);
      back[j] = levels->value(sub, codes[j]);
    }
    const int64_t left = block_ - j - 1;
    add_scaled(values + j + 1, values[j] - back[j], &flow_[(begin + j) * cols_ + begin + j] + 1, left);
  }
  if (levels) levels->pack(codes);
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
