#include "engine/hidden_pool.h"

#include <algorithm>

namespace millrace {

HiddenPool::HiddenPool(Pooling kind, int32_t prompt_tokens, int32_t hidden)
    : kind_(kind),
      sum_(static_cast<size_t>(hidden), 0.0),
      row_(static_cast<size_t>(hidden)),
      next_(kind == Pooling::kLast ? prompt_tokens - 1 : 0),
      end_(kind == Pooling::kFirst ? 1 : prompt_tokens),
      count_(end_ - next_) {
  if (kind == Pooling::kNone) rows_.reserve(static_cast<size_t>(prompt_tokens) * static_cast<size_t>(hidden));
}

void HiddenPool::add(const Runtime& runtime, int32_t first_row, int32_t first, int32_t last) {
  for (; next_ >= first && next_ < std::min(last, end_); ++next_) {
    runtime.read_hidden(first_row + next_ - first, row_);
    if (kind_ == Pooling::kNone) {
      rows_.insert(rows_.end(), row_.begin(), row_.end());
      continue;
    }
    for (size_t i = 0; i < row_.size(); ++i) sum_[i] += row_[i];
  }
}

std::vector<float> HiddenPool::take() {
  if (kind_ == Pooling::kNone) return std::move(rows_);
  std::vector<float> out;
  out.reserve(sum_.size());
  for (const double s : sum_) out.push_back(static_cast<float>(s / count_));
  return out;
}

}  // namespace millrace
