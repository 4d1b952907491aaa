#include "backend/cpu/rank_part.h"

#include <algorithm>

#include "backend/rank_spec.h"
#include "base/check.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kRowsPerTask = 4;  // that a thread copies

}  // namespace

RankPart::RankPart(dist::Communicator& group, const dist::Shares& shares, const ExecutorSpec& whole)
    : group_(group),
      shares_(shares),
      heads_(shares.heads(whole.heads, whole.kv_heads)),
      query_bounds_(query_bounds(shares, whole)),
      bytes_(static_cast<size_t>(shares.ranks())),
      out_bytes_(bytes_.size()),
      pairs_of_(bytes_.size()) {
  const int64_t chosen = int64_t{whole.max_tokens} * whole.experts_per_token;
  // Of whole experts what goes out are their outputs.
  const int64_t expert_cols = shares.whole_experts() ? whole.hidden : whole.expert_ffn;
  const int64_t inner = std::max(int64_t{whole.max_tokens} * whole.ffn, chosen * expert_cols);
  // What arrives: of whole experts this rank's columns of the outputs.
  exchanged_.resize(static_cast<size_t>(
      std::max({int64_t{whole.max_tokens} * whole.hidden, inner, whole.max_tokens * query_bounds_.back(),
                int64_t{whole.max_logit_rows} * whole.vocab})));
  inner_.resize(static_cast<size_t>(inner));
}

// exchanged_ holds the ranks' parts one after the other: rank r's columns of row i are at
// bounds[r] * rows + i * (columns of rank r).
void RankPart::gather(ThreadPool& pool, const float* mine, int64_t stride, float* whole,
                      std::span<const int64_t> bounds, int64_t rows) {
  const auto rank = static_cast<size_t>(shares_.rank());
  const int64_t cols = bounds[rank + 1] - bounds[rank];
  MILLRACE_CHECK(static_cast<size_t>(rows * bounds.back()) <= exchanged_.size());
  float* own = exchanged_.data() + bounds[rank] * rows;
  pool.parallel_for(rows, kRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) std::copy_n(mine + i * stride, cols, own + i * cols);
  });
  for (size_t r = 0; r < bytes_.size(); ++r) {
    bytes_[r] = static_cast<size_t>((bounds[r + 1] - bounds[r]) * rows) * sizeof(float);
  }
  const std::span<float> all(exchanged_.data(), static_cast<size_t>(rows * bounds.back()));
  pool.stay_awake();
  group_.all_gather(std::as_bytes(std::span(own, static_cast<size_t>(rows * cols))),
                    std::as_writable_bytes(all), bytes_);
  unpack(pool, whole, bounds, rows);
}

void RankPart::unpack(ThreadPool& pool, float* whole, std::span<const int64_t> bounds, int64_t rows) {
  const int64_t total = bounds.back();
  pool.parallel_for(rows, kRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      for (size_t r = 0; r + 1 < bounds.size(); ++r) {
        const int64_t width = bounds[r + 1] - bounds[r];
        std::copy_n(exchanged_.data() + bounds[r] * rows + i * width, width, whole + i * total + bounds[r]);
      }
    }
  });
}

void RankPart::gather_rows(ThreadPool& pool, const float* mine, int64_t stride, float* whole, int64_t total,
                           int64_t rows) {
  gather(pool, mine, stride, whole, shares_.cut(total), rows);
}

void RankPart::gather_heads(ThreadPool& pool, const float* mine, float* whole, int64_t rows) {
  const auto rank = static_cast<size_t>(shares_.rank());
  gather(pool, mine, query_bounds_[rank + 1] - query_bounds_[rank], whole, query_bounds_, rows);
}

void RankPart::sort_pairs(const int32_t* chosen, int64_t pairs, int64_t experts) {
  own_chosen_.assign(static_cast<size_t>(pairs), -1);
  place_.assign(static_cast<size_t>(pairs), -1);
  own_pairs_.clear();
  std::fill(pairs_of_.begin(), pairs_of_.end(), 0);
  const dist::Range own = shares_.experts(experts);
  int64_t arrives = 0;
  for (int r = 0; r < shares_.ranks(); ++r) {
    const dist::Range theirs = shares_.experts_of(r, experts);
    const int64_t before = arrives;
    for (int64_t p = 0; p < pairs; ++p) {
      if (chosen[p] < theirs.begin || chosen[p] >= theirs.end) continue;
      place_[static_cast<size_t>(p)] = static_cast<int32_t>(arrives++);
      if (r != shares_.rank()) continue;
      own_pairs_.push_back(static_cast<int32_t>(p));
      own_chosen_[static_cast<size_t>(p)] = chosen[p] - static_cast<int32_t>(own.begin);
    }
    pairs_of_[static_cast<size_t>(r)] = arrives - before;
  }
}

void RankPart::add_experts(const Context& ctx, const WeighOutputs& made, int64_t rows, int64_t k, float* y) {
  const std::vector<int64_t> bounds = shares_.cut(made.cols);
  const auto width = [&](size_t r) { return bounds[r + 1] - bounds[r]; };
  const int64_t own = width(static_cast<size_t>(shares_.rank()));
  const auto sent = std::ssize(own_pairs_);
  MILLRACE_CHECK(static_cast<size_t>(sent * made.cols) <= inner_.size());
  int64_t arrives = 0;
  for (size_t r = 0; r < bytes_.size(); ++r) {
    weigh_outputs(ctx, made, own_pairs_, bounds[r], width(r), inner_.data() + bounds[r] * sent);
    out_bytes_[r] = static_cast<size_t>(sent * width(r)) * sizeof(float);
    bytes_[r] = static_cast<size_t>(pairs_of_[r] * own) * sizeof(float);
    arrives += pairs_of_[r] * own;
  }
  MILLRACE_CHECK(static_cast<size_t>(arrives) <= exchanged_.size());
  ctx.pool.stay_awake();
  group_.all_to_all(
      std::as_bytes(std::span(inner_.data(), static_cast<size_t>(sent * made.cols))), out_bytes_,
      std::as_writable_bytes(std::span(exchanged_.data(), static_cast<size_t>(arrives))), bytes_);
  add_outputs(ctx, {exchanged_.data(), place_.data(), rows, k, own, y, made.cols});
}

void RankPart::collect_rows(ThreadPool& pool, const float* mine, float* whole, int64_t total, int64_t rows) {
  const std::vector<int64_t> bounds = shares_.cut(total);
  const auto part = [&](size_t r) {
    return std::span<float>(exchanged_.data() + bounds[r] * rows,
                            static_cast<size_t>((bounds[r + 1] - bounds[r]) * rows));
  };
  const size_t own = part(static_cast<size_t>(group_.rank())).size();
  if (group_.rank() != 0) return group_.send(0, std::as_bytes(std::span(mine, own)));
  std::copy_n(mine, own, exchanged_.data());
  for (int r = 1; r < group_.size(); ++r)
    group_.recv(r, std::as_writable_bytes(part(static_cast<size_t>(r))));
  unpack(pool, whole, bounds, rows);
}

}  // namespace millrace::cpu
