#include "kernels/cpu/attention/sparse_attention.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>

#include "base/check.h"
#include "base/sparse_pages.h"

namespace millrace::cpu {
namespace {

// Pages whose bounds a task makes where there are fewer rows than threads: 32 KiB of a head of 64.
constexpr int64_t kPagesPerTask = 128;
// Tasks (a row and a KV head) per thread below which their pages are scored by several threads.
constexpr int64_t kTasksPerThread = 4;
// Rows whose chosen pages are held at a time: enough to hide the barriers between the three passes, in at
// most so many bytes unless threads need more.
constexpr int64_t kMaxRowsAtOnce = 64, kMaxTableBytes = int64_t{16} << 20;

int64_t pages_of(const AttentionShape& shape) { return std::max(1, blocks_for(shape.max_context)); }

int64_t rows_at_once(const AttentionShape& shape, int threads) {
  const int64_t of_row = std::max(1, shape.kv_heads) * pages_of(shape) * int64_t{sizeof(int32_t)};
  const int64_t least = (kTasksPerThread * threads + shape.kv_heads - 1) / std::max(1, shape.kv_heads);
  const int64_t rows = std::clamp(kMaxTableBytes / of_row, std::min(least, kMaxRowsAtOnce), kMaxRowsAtOnce);
  return std::clamp<int64_t>(rows, 1, std::max<int64_t>(1, shape.max_rows));
}

AttentionShape shape_of_rows(AttentionShape shape, int threads) {
  shape.max_rows = rows_at_once(shape, threads);
  shape.sparse = false;
  return shape;
}

}  // namespace

SparsePlan::SparsePlan(const AttentionShape& shape, int threads, Arena& arena)
    : shape_(shape),
      max_pages_(pages_of(shape)),
      rows_at_once_(rows_at_once(shape, threads)),
      slots_(kTasksPerThread * threads),
      rows_plan_(shape_of_rows(shape, threads), threads, arena) {
  const int64_t tasks = rows_at_once_ * shape.kv_heads, group = rows_plan_.group_size();
  sequences_ = arena.take<AttentionSequence>(rows_at_once_);
  tables_ = arena.take<const int32_t*>(tasks);
  chosen_ = arena.take<int32_t>(tasks * max_pages_);
  scores_ = arena.take<float>(slots_ * group * max_pages_);
  queries_ = arena.take<float>(slots_ * 2 * group * rows_plan_.padded_dim());
  weights_ = arena.take<float>(threads * max_pages_);
  order_ = arena.take<uint64_t>(threads * max_pages_);
}

// One layer's.
class SparseRun {
 public:
  SparseRun(const Context& ctx, const AttentionPlan& plan, SparsePlan& sparse, const PagedAttention& op,
            const PageSummaries& summaries)
      : ctx_(ctx),
        plan_(plan),
        sparse_(sparse),
        op_(op),
        summaries_(summaries),
        kv_heads_(sparse.shape_.kv_heads),
        group_(sparse.rows_plan_.group_size()),
        padded_dim_(sparse.rows_plan_.padded_dim()) {}

  void run() {
    const std::span<const int32_t> rows = plan_.sparse_rows();
    for (size_t done = 0; done < rows.size(); done += static_cast<size_t>(sparse_.rows_at_once_)) {
      attend(rows.subspan(done, std::min(rows.size() - done, static_cast<size_t>(sparse_.rows_at_once_))));
    }
  }

 private:
  const AttentionSequence& sequence_of(int32_t row) const {
    return plan_.sequences()[plan_.sequence_of()[row]];
  }
  const int32_t* table_of(int32_t row) const { return op_.kv.tables[plan_.sequence_of()[row]]; }
  // Full pages before the row's own.
  int32_t pages_before(int32_t row) const { return plan_.positions()[row] / kBlockTokens; }
  float* scores_at(int64_t slot) const { return sparse_.scores_ + slot * group_ * sparse_.max_pages_; }

  void attend(std::span<const int32_t> rows);
  void split_query(int32_t row, int64_t kv_head, int64_t slot) const;
  void score(int32_t row, int64_t kv_head, int64_t slot, int32_t first, int32_t last) const;
  void choose(int32_t row, int64_t task, int64_t slot, int thread) const;

  const Context& ctx_;
  const AttentionPlan& plan_;
  SparsePlan& sparse_;
  const PagedAttention& op_;
  const PageSummaries& summaries_;
  const int64_t kv_heads_;
  const int32_t group_;
  const int64_t padded_dim_;
};

// What of each query is above and below zero: multiplied with the largest and the least keys.
void SparseRun::split_query(int32_t row, int64_t kv_head, int64_t slot) const {
  const int64_t dim = sparse_.shape_.head_dim;
  const float* query = op_.query + (row * kv_heads_ + kv_head) * group_ * dim;
  float* above = sparse_.queries_ + slot * 2 * group_ * padded_dim_;
  float* below = above + group_ * padded_dim_;
  for (int32_t g = 0; g < group_; ++g) {
    for (int64_t d = 0; d < padded_dim_; ++d) {
      const float q = d < dim ? query[g * dim + d] : 0.0f;
      above[g * padded_dim_ + d] = q < 0.0f ? 0.0f : q;  // a NaN stays one
      below[g * padded_dim_ + d] = q < 0.0f ? q : 0.0f;
    }
  }
}

void SparseRun::score(int32_t row, int64_t kv_head, int64_t slot, int32_t first, int32_t last) const {
  PageScores s;
  s.summaries = summaries_.of(0, kv_head);
  s.block_stride = summaries_.block_stride();
  s.table = table_of(row);
  s.first = first;
  s.last = last;
  s.rows = group_;
  s.padded_dim = static_cast<int32_t>(padded_dim_);
  s.above = sparse_.queries_ + slot * 2 * group_ * padded_dim_;
  s.below = s.above + group_ * padded_dim_;
  s.scale = op_.scale;
  s.out = scores_at(slot);
  s.out_stride = sparse_.max_pages_;
  ctx_.kernels.page_scores(s);
}

// From bounds to the table of chosen blocks.
void SparseRun::choose(int32_t row, int64_t task, int64_t slot, int thread) const {
  const int32_t before = pages_before(row), pages = sequence_of(row).sparse_pages;
  const PageChoice choice = page_choice(pages, before + 1);
  float* weights = sparse_.weights_ + thread * sparse_.max_pages_;
  std::fill_n(weights, before, 0.0f);
  for (int32_t g = 0; g < group_; ++g) {
    float* scores = scores_at(slot) + g * sparse_.max_pages_;
    constexpr float kMost = std::numeric_limits<float>::max();
    float largest = -kMost;
    for (int32_t i = 0; i < before; ++i) {
      if (!(scores[i] <= kMost)) {  // no bound: keys overflow or are no numbers, which is to be seen
        weights[i] = std::numeric_limits<float>::infinity();
        scores[i] = -kMost;
      }
      largest = scores[i] > largest ? scores[i] : largest;
    }
    for (int32_t i = 0; i < before; ++i) scores[i] -= largest;
    ctx_.kernels.exp(scores, before, scores);
    float sum = 0.0f;
    for (int32_t i = 0; i < before; ++i) sum += scores[i];
    const float factor = 1.0f / sum;
    for (int32_t i = 0; i < before; ++i) weights[i] += scores[i] * factor;
  }
  // Weights are no less than zero, so their bits are in order too; of equals the earlier page is the larger
  // number.
  uint64_t* order = sparse_.order_ + thread * sparse_.max_pages_;
  const int32_t candidates = choice.last - choice.first;
  for (int32_t i = 0; i < candidates; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(weights[choice.first + i]);
    order[i] = uint64_t{bits} << 32 | (UINT32_MAX - static_cast<uint32_t>(choice.first + i));
  }
  MILLRACE_CHECK(choice.wanted > 0 && choice.wanted < candidates);
  std::nth_element(order, order + choice.wanted, order + candidates, std::greater<>());
  int32_t* chosen = sparse_.chosen_ + task * sparse_.max_pages_;
  const int32_t* table = table_of(row);
  std::copy_n(table, kSinkPages, chosen);
  int32_t* picked = chosen + kSinkPages;
  for (int32_t i = 0; i < choice.wanted; ++i)
    picked[i] = static_cast<int32_t>(UINT32_MAX - static_cast<uint32_t>(order[i]));
  std::sort(picked, picked + choice.wanted);
  for (int32_t i = 0; i < choice.wanted; ++i) picked[i] = table[picked[i]];
  std::copy(table + choice.last, table + before + 1, picked + choice.wanted);
  sparse_.tables_[task] = chosen;
}

void SparseRun::attend(std::span<const int32_t> rows) {
  const int64_t tasks = std::ssize(rows) * kv_heads_;
  if (tasks <= sparse_.slots_ && ctx_.pool.size() > 1) {
    int64_t parts = 1;
    for (const int32_t row : rows)
      parts = std::max<int64_t>(parts, (pages_before(row) + kPagesPerTask - 1) / kPagesPerTask);
    for (int64_t task = 0; task < tasks; ++task)
      split_query(rows[static_cast<size_t>(task / kv_heads_)], task % kv_heads_, task);
    ctx_.pool.parallel_for(tasks * parts, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t task = i / parts, first = i % parts * kPagesPerTask;
        const int32_t row = rows[static_cast<size_t>(task / kv_heads_)];
        const int64_t last = std::min<int64_t>(pages_before(row), first + kPagesPerTask);
        if (first >= last) continue;
        score(row, task % kv_heads_, task, static_cast<int32_t>(first), static_cast<int32_t>(last));
      }
    });
    ctx_.pool.parallel_for(tasks, 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t task = begin; task < end; ++task)
        choose(rows[static_cast<size_t>(task / kv_heads_)], task, task, thread);
    });
  } else {
    ctx_.pool.parallel_for(tasks, 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t task = begin; task < end; ++task) {
        const int32_t row = rows[static_cast<size_t>(task / kv_heads_)];
        split_query(row, task % kv_heads_, thread);
        score(row, task % kv_heads_, thread, 0, pages_before(row));
        choose(row, task, thread, thread);
      }
    });
  }
  // The chosen pages are a context of their own, whose last page is the row's.
  for (size_t i = 0; i < rows.size(); ++i) {
    const int32_t position = plan_.positions()[rows[i]];
    sparse_.sequences_[i] = {
        rows[i], 1, (sequence_of(rows[i]).sparse_pages - 1) * kBlockTokens + position % kBlockTokens};
  }
  sparse_.rows_plan_.begin_rows({sparse_.sequences_, rows.size()});
  PagedAttention of_chosen = op_;
  of_chosen.kv.tables = sparse_.tables_;
  of_chosen.kv.head_tables = true;
  paged_attention(ctx_, sparse_.rows_plan_, of_chosen);
}

void sparse_attention(const Context& ctx, const AttentionPlan& plan, SparsePlan& sparse,
                      const PagedAttention& op, const PageSummaries& summaries) {
  SparseRun(ctx, plan, sparse, op, summaries).run();
}

}  // namespace millrace::cpu
