// The cpu executor as half of a mixed one (backend/mixed_part.h), and which rows of a step are its own where
// a context is spread over ranks.
#include <algorithm>

#include "backend/cpu/cpu_executor.h"
#include "base/check.h"
#include "kernels/cpu/elementwise/scale.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kFloatsPerTask = 16384;  // that a task copies or adds

// body(begin, end) over [0, size): a decoded token's row by the calling thread.
template <class Body>
void in_pieces(ThreadPool& pool, size_t size, const Body& body) {
  const auto count = static_cast<int64_t>(size);
  if (count <= kFloatsPerTask) return body(0, count);
  pool.parallel_for(count, kFloatsPerTask, [&](int64_t begin, int64_t end, int) { body(begin, end); });
}

}  // namespace

void CpuExecutor::send_rows(bool routing) {
  sends_copy_ = false;
  const HostRows now = rows_out();
  sends_copy_ = routing;
  if (!routing) return;
  sent_residual_.assign(now.residual.begin(), now.residual.end());
  sent_chosen_.assign(now.chosen.begin(), now.chosen.end());
  sent_weight_.assign(now.weights.begin(), now.weights.end());
}

HostRows CpuExecutor::rows_out() {
  if (sends_copy_) return {sent_residual_, sent_chosen_, sent_weight_};
  const auto rows = static_cast<size_t>(rows_), k = static_cast<size_t>(spec_.experts_per_token);
  return {{work_->residual, rows * static_cast<size_t>(spec_.hidden)},
          {work_->chosen, rows * k},
          {work_->chosen_weight, rows * k}};
}

void CpuExecutor::set_residual(std::span<const float> rows) {
  MILLRACE_CHECK(std::ssize(rows) == rows_ * spec_.hidden);
  in_pieces(pool_, rows.size(), [&](int64_t begin, int64_t end) {
    std::copy(rows.data() + begin, rows.data() + end, work_->residual + begin);
  });
}

void CpuExecutor::add_residual(std::span<const float> rows) {
  MILLRACE_CHECK(std::ssize(rows) == rows_ * spec_.hidden);
  in_pieces(pool_, rows.size(), [&](int64_t begin, int64_t end) {
    add_values(rows.data() + begin, end - begin, work_->residual + begin);
  });
}

void CpuExecutor::take_routed(const Norm& norm, const HostRows& rows) {
  MILLRACE_CHECK(std::ssize(rows.chosen) == rows_ * spec_.experts_per_token);
  set_residual(rows.residual);
  norm_for(norm, {});
  std::copy(rows.chosen.begin(), rows.chosen.end(), work_->chosen);
  std::copy(rows.weights.begin(), rows.weights.end(), work_->chosen_weight);
  in_pieces(pool_, rows.residual.size(), [&](int64_t begin, int64_t end) {
    std::fill(work_->residual + begin, work_->residual + end, 0.0f);
  });
}

void CpuExecutor::keep_experts(std::span<const int32_t> local) {
  int32_t* chosen = work_->chosen;
  for (int64_t i = 0; i < rows_ * spec_.experts_per_token; ++i)
    chosen[i] = local[static_cast<size_t>(chosen[i])];
}

// ---------------------------------------------------------------- a context over ranks

// Those of the batch's logit rows that this rank computes. Behind the last layer: hidden states go to rank 0
// where all of them are asked for.
std::span<const int32_t> CpuExecutor::own_logit_rows() {
  if (over_ranks_ == nullptr) return batch_.logit_rows;
  if (!batch_.only_logits) over_ranks_->collect_hidden(work_->residual, spec_.hidden);
  own_logit_rows_.clear();
  for (const int32_t i : over_ranks_->own_logits())
    own_logit_rows_.push_back(batch_.logit_rows[static_cast<size_t>(i)]);
  return own_logit_rows_;
}

std::span<const int32_t> CpuExecutor::greedy_over_ranks() {
  const int64_t rows = std::ssize(over_ranks_->own_logits());
  if (rows > 0) argmax_rows(context(), work_->logits, rows, spec_.vocab, work_->argmax, greedy_.data());
  return over_ranks_->collect<int32_t>(greedy_.data(), 1, whole_greedy_);
}

}  // namespace millrace::cpu
