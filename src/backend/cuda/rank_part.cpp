#include "backend/cuda/rank_part.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "backend/rank_spec.h"
#include "base/check.h"
#include "base/error.h"
#include "dist/token_parts.h"

namespace millrace::cuda {
namespace {

int64_t most_pairs(const ExecutorSpec& whole) { return int64_t{whole.max_tokens} * whole.experts_per_token; }

// Values of the longest exchange, of all ranks together; of whole experts also their inputs.
int64_t most_exchanged(const dist::Shares& shares, const ExecutorSpec& whole) {
  const int64_t rows = whole.max_tokens;
  return std::max({rows * whole.hidden, rows * whole.ffn,
                   most_pairs(whole) * (shares.whole_experts() ? whole.hidden : whole.expert_ffn),
                   rows * whole.heads * whole.head_dim});
}

size_t list_bytes(const dist::Shares& shares, const ExecutorSpec& whole) {
  return shares.whole_experts() ? static_cast<size_t>(most_pairs(whole)) * sizeof(int32_t) : 0;
}

// Outputs of whole experts are sorted on the host, so that everything may wait for it. The same on all ranks.
LinkKind link_for(const dist::Shares& shares, const ExecutorSpec& whole) {
  const LinkKind wanted = wanted_link();
  if (!shares.whole_experts()) return wanted;
  for (int r = 0; r < shares.ranks(); ++r) {
    if (shares.experts_of(r, whole.experts).size() > 0) continue;
    throw_error(ErrorCode::kUnsupported,
                "device cuda: rank {} would have none of the {} experts, expected some in every rank", r,
                whole.experts);
  }
  if (wanted == LinkKind::kNccl) {
    throw_error(ErrorCode::kUnsupported,
                "MILLRACE_RANK_LINK: found nccl, expected staged: whole experts go through the host");
  }
  return LinkKind::kStaged;
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
      link_(make_device_link(group, device, most_exchanged(shares, whole), link_for(shares, whole))),
      columns_(column_bytes(shares, whole), "a rank's columns"),
      exchanged_(static_cast<size_t>(most_exchanged(shares, whole)) * sizeof(float), "what ranks exchange"),
      attended_(attended_bytes(shares, whole), "what ranks exchange"),
      counts_(static_cast<size_t>(shares.ranks())),
      own_rows_(list_bytes(shares, whole), "a rank's experts"),
      lists_(3 * list_bytes(shares, whole), "a rank's experts"),
      made_(list_bytes(shares, whole) * static_cast<size_t>(whole.hidden), "what experts made"),
      pairs_of_(counts_.size()),
      out_bytes_(counts_.size()),
      in_bytes_(counts_.size()) {
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
  return column_bytes(shares, whole) + static_cast<size_t>(most_exchanged(shares, whole)) * sizeof(float) +
         attended_bytes(shares, whole) + list_bytes(shares, whole);
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

int64_t RankPart::sort_pairs(int32_t* chosen, int64_t pairs, int32_t pairs_per_row, const Launch& at) {
  auto* const host = lists_.as<int32_t>();
  MILLRACE_CHECK(static_cast<size_t>(pairs) * sizeof(int32_t) <= own_rows_.bytes());
  const auto copy = [&](void* to, const void* from, int64_t count, cudaMemcpyKind kind) {
    if (count == 0) return;
    MILLRACE_CUDA_TRY(
        cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(int32_t), kind, at.stream));
  };
  copy(host, chosen, pairs, cudaMemcpyDeviceToHost);
  MILLRACE_CUDA_TRY(cudaStreamSynchronize(at.stream));
  int32_t *const rows = host + pairs, *const experts = rows + pairs;
  own_pairs_.clear();
  place_.assign(static_cast<size_t>(pairs), -1);
  int32_t arrives = 0;
  for (int r = 0; r < shares_.ranks(); ++r) {
    const dist::Range theirs = shares_.experts_of(r, whole_.experts);
    const int32_t before = arrives;
    for (int32_t p = 0; p < pairs; ++p) {
      if (host[p] < theirs.begin || host[p] >= theirs.end) continue;
      place_[static_cast<size_t>(p)] = arrives++;
      if (r != shares_.rank()) continue;
      rows[own_pairs_.size()] = p / pairs_per_row;
      experts[own_pairs_.size()] = host[p] - static_cast<int32_t>(theirs.begin);
      own_pairs_.push_back(p);
    }
    pairs_of_[static_cast<size_t>(r)] = arrives - before;
  }
  copy(own_rows_.as<void>(), rows, std::ssize(own_pairs_), cudaMemcpyHostToDevice);
  copy(chosen, experts, std::ssize(own_pairs_), cudaMemcpyHostToDevice);
  return std::ssize(own_pairs_);
}

void RankPart::exchange_outputs(float* outputs, int64_t pairs, const Launch& at) {
  const std::vector<int64_t> bounds = shares_.cut(whole_.hidden);
  const int64_t hidden = whole_.hidden, own = this->own(hidden), sent = std::ssize(own_pairs_);
  auto* const made = made_.as<float>();
  if (sent > 0) {
    MILLRACE_CUDA_TRY(cudaMemcpyAsync(made, outputs, static_cast<size_t>(sent * hidden) * sizeof(float),
                                      cudaMemcpyDeviceToHost, at.stream));
  }
  MILLRACE_CUDA_TRY(cudaStreamSynchronize(at.stream));
  out_.resize(static_cast<size_t>(sent * hidden));
  in_.resize(static_cast<size_t>(std::accumulate(pairs_of_.begin(), pairs_of_.end(), int64_t{0}) * own));
  for (size_t r = 0; r < pairs_of_.size(); ++r) {
    const int64_t width = bounds[r + 1] - bounds[r];
    float* to = out_.data() + bounds[r] * sent;
    for (int64_t i = 0; i < sent; ++i) std::copy_n(made + i * hidden + bounds[r], width, to + i * width);
    out_bytes_[r] = static_cast<size_t>(sent * width) * sizeof(float);
    in_bytes_[r] = static_cast<size_t>(pairs_of_[r] * own) * sizeof(float);
  }
  group_.all_to_all(std::as_bytes(std::span(out_)), out_bytes_, std::as_writable_bytes(std::span(in_)),
                    in_bytes_);
  if (pairs * own == 0) return;
  for (int64_t p = 0; p < pairs; ++p) {
    const int64_t place = place_[static_cast<size_t>(p)];
    if (place < 0) {
      std::fill_n(made + p * own, own, 0.0f);
    } else {
      std::copy_n(in_.data() + place * own, own, made + p * own);
    }
  }
  // The next step's copy down, and its wait, come behind this one.
  MILLRACE_CUDA_TRY(cudaMemcpyAsync(outputs, made, static_cast<size_t>(pairs * own) * sizeof(float),
                                    cudaMemcpyHostToDevice, at.stream));
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
