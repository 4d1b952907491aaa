#include "engine/hidden_pool.h"

namespace millrace {

HiddenPool::HiddenPool(Pooling kind, int32_t prompt_tokens, int32_t hidden)
    : sum_(static_cast<size_t>(hidden), 0.0),
      row_(static_cast<size_t>(hidden)),
      next_(kind == Pooling::kLast ? prompt_tokens - 1 : 0),
      end_(prompt_tokens),
      count_(prompt_tokens - next_) {}

void HiddenPool::add(const Runtime& runtime, int32_t first_row, int32_t first, int32_t last) {
  for (; next_ >= first && next_ < last; ++next_) {
    runtime.read_hidden(first_row + next_ - first, row_);
    for (size_t i = 0; i < row_.size(); ++i) sum_[i] += row_[i];
  }
}

std::vector<float> HiddenPool::mean() const {
  std::vector<float> out;
  out.reserve(sum_.size());
  for (const double s : sum_) out.push_back(static_cast<float>(s / count_));
  return out;
}

}  // namespace millrace
