#include "backend/cuda/rank_part.h"

#include <algorithm>
#include <cmath>

#include "backend/rank_spec.h"
#include "base/check.h"
#include "dist/token_parts.h"

namespace millrace::cuda {
namespace {

// Values of the longest exchange, of all ranks together.
int64_t most_exchanged(const ExecutorSpec& whole) {
  const int64_t rows = whole.max_tokens;
  return std::max({rows * whole.hidden, rows * whole.ffn, rows * whole.experts_per_token * whole.expert_ffn,
                   rows * whole.heads * whole.head_dim});
}

size_t attended_bytes(const dist::Shares& shares, const ExecutorSpec& whole) {
  if (shares.whole_attention()) return 0;
  return static_cast<size_t>(int64_t{whole.max_tokens} * whole.heads * whole.head_dim) * sizeof(float);
}

size_t column_bytes(const dist::Shares& shares, const ExecutorSpec& whole) {
  return static_cast<size_t>(whole.max_tokens * shares.rows(whole.hidden).size()) * sizeof(float);
}

// The lowest token of the largest logit; -1 when one is NaN.
int32_t largest_of(std::span<const float> logits) {
  size_t best = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) return -1;
    if (logits[i] > logits[best]) best = i;
  }
  return static_cast<int32_t>(best);
}

}  // namespace

RankPart::RankPart(dist::Communicator& group, const dist::Shares& shares, const ExecutorSpec& whole,
                   const Device& device)
    : group_(group),
      shares_(shares),
      whole_(whole),
      query_bounds_(query_bounds(shares, whole)),
      link_(make_device_link(group, device, most_exchanged(whole), wanted_link())),
      columns_(column_bytes(shares, whole), "a rank's columns"),
      exchanged_(static_cast<size_t>(most_exchanged(whole)) * sizeof(float), "what ranks exchange"),
      attended_(attended_bytes(shares, whole), "what ranks exchange"),
      counts_(static_cast<size_t>(shares.ranks())) {
  static_assert(dist::kMaxTensorRanks <= kMaxColumnParts);
  MILLRACE_CHECK(group.size() == shares.ranks());
  if (group.rank() == 0) {
    whole_logits_.resize(static_cast<size_t>(whole.max_logit_rows) * static_cast<size_t>(whole.vocab));
  }
  greedy_.resize(static_cast<size_t>(whole.max_logit_rows));
}

ExecutorSpec RankPart::local_spec(const dist::Shares& shares, const ExecutorSpec& whole) {
  ExecutorSpec local = rank_spec(shares, whole);
  local.vocab = static_cast<int32_t>(shares.rows(whole.vocab).size());
  return local;
}

size_t RankPart::bytes(const dist::Shares& shares, const ExecutorSpec& whole) {
  return column_bytes(shares, whole) + static_cast<size_t>(most_exchanged(whole)) * sizeof(float) +
         attended_bytes(shares, whole);
}

float* RankPart::take_columns(const float* residual, int64_t rows, const Launch& at) {
  const dist::Range own = shares_.rows(whole_.hidden);
  launch_take_columns(residual, whole_.hidden, own.begin, own.size(), rows, columns_.as<float>(), at);
  return columns_.as<float>();
}

// What arrives lies rank after rank: rank r's [rows, its columns] from bounds[r] * rows on.
void RankPart::gather(const float* mine, std::span<const int64_t> bounds, float* whole, int64_t rows,
                      const Launch& at) {
  ColumnParts cut;
  cut.parts = shares_.ranks();
  std::copy(bounds.begin(), bounds.end(), cut.bounds);
  for (size_t r = 0; r < counts_.size(); ++r) counts_[r] = (bounds[r + 1] - bounds[r]) * rows;
  MILLRACE_CHECK(static_cast<size_t>(rows * cut.total()) * sizeof(float) <= exchanged_.bytes());
  if (rows == 0) return;
  link_->all_gather(mine, exchanged_.as<float>(), counts_, at);
  launch_join_columns(exchanged_.as<const float>(), cut, rows, whole, at);
}

void RankPart::gather_rows(const float* mine, int64_t total, float* whole, int64_t rows, const Launch& at) {
  gather(mine, shares_.cut(total), whole, rows, at);
}

const float* RankPart::gather_heads(const float* mine, int64_t rows, const Launch& at) {
  gather(mine, query_bounds_, attended_.as<float>(), rows, at);
  return attended_.as<const float>();
}

std::span<const float> RankPart::collect_logits(std::span<const float> own, int64_t rows) {
  if (rows == 0) return {};
  if (group_.rank() != 0) {
    group_.send(0, std::as_bytes(own));
    return {};
  }
  const std::vector<int64_t> bounds = shares_.cut(whole_.vocab);
  for (int r = 0; r < group_.size(); ++r) {
    const int64_t first = bounds[static_cast<size_t>(r)], width = bounds[static_cast<size_t>(r) + 1] - first;
    std::span<const float> theirs = own;
    if (r > 0) {
      part_.resize(static_cast<size_t>(rows * width));
      group_.recv(r, std::as_writable_bytes(std::span(part_)));
      theirs = part_;
    }
    MILLRACE_CHECK(std::ssize(theirs) == rows * width);
    for (int64_t i = 0; i < rows; ++i) {
      std::copy_n(theirs.data() + i * width, width, whole_logits_.data() + i * whole_.vocab + first);
    }
  }
  return {whole_logits_.data(), static_cast<size_t>(rows * whole_.vocab)};
}

std::span<const int32_t> RankPart::collect_greedy(std::span<const float> own, int64_t rows) {
  const std::span<int32_t> tokens(greedy_.data(), static_cast<size_t>(rows));
  std::vector<float> values(tokens.size());
  const dist::Range part = shares_.rows(whole_.vocab);
  const auto width = static_cast<size_t>(part.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::span<const float> logits = own.subspan(i * width, width);
    tokens[i] = width == 0 ? dist::kNoTokens : largest_of(logits);
    if (tokens[i] < 0) continue;
    values[i] = logits[static_cast<size_t>(tokens[i])];
    tokens[i] += static_cast<int32_t>(part.begin);
  }
  if (!tokens.empty()) dist::collect_largest(group_, tokens, values);
  return tokens;
}

}  // namespace millrace::cuda
