#include "kernels/cpu/attention/indexed_attention.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <span>

#include "base/check.h"
#include "kernels/cpu/attention/rotary.h"
#include "kernels/quant/kv_types.h"

namespace millrace::cpu {
namespace {

// Pages whose scores are a task of their own.
constexpr int64_t kIndexPagesPerTask = 32;
// Rows whose chosen keys are held at a time, and their bytes unless threads need more.
constexpr int64_t kMaxIndexedRows = 64, kMaxChosenBytes = int64_t{16} << 20;
// Rows whose index queries and keys a task rotates.
constexpr int64_t kIndexRowsPerTask = 4;
// A vector behind the last key may be loaded past it.
constexpr int64_t kChosenSlack = 64;

int64_t whole_pages(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

int64_t indexed_rows(const AttentionShape& shape, int64_t row_bytes, int threads) {
  const int64_t least = std::min<int64_t>(threads, kMaxIndexedRows);
  const int64_t rows = std::clamp(kMaxChosenBytes / std::max<int64_t>(1, row_bytes), least, kMaxIndexedRows);
  return std::clamp<int64_t>(rows, 1, std::max<int64_t>(1, shape.max_rows));
}

int64_t keys_bytes(DType type, int64_t head_dim) {
  return kBlockTokens * static_cast<int64_t>(kv_head_bytes(type, head_dim));
}

AttentionShape shape_of_indexed(AttentionShape shape, const IndexShape& index, int64_t rows) {
  shape.max_rows = rows;
  shape.max_context = index.top;
  shape.sparse = false;
  shape.index_top = 0;
  return shape;
}

// Numbers whose order is that of scores; both zeros are one, and what is no number comes first: it is to be
// seen.
uint32_t in_order(float score) {
  if (std::isnan(score)) return UINT32_MAX;
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// 16 tokens' keys, each from its own page: from[i] is where the page's keys begin, at[i] the token in it.
template <class Value>
void gather(const uint8_t* const* from, const int32_t* at, int64_t count, int64_t dims, uint8_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* source = from[i] + static_cast<size_t>(at[i]) * sizeof(Value);
    uint8_t* target = to + static_cast<size_t>(i) * sizeof(Value);
    for (int64_t d = 0; d < dims; ++d) {
      constexpr size_t kStride = kBlockTokens * sizeof(Value);
      std::memcpy(target + static_cast<size_t>(d) * kStride, source + static_cast<size_t>(d) * kStride,
                  sizeof(Value));
    }
  }
}

// The scales of fp8, [16] too, are one more dimension.
void gather_keys(DType type, const uint8_t* const* from, const int32_t* at, int64_t count, int64_t head_dim,
                 uint8_t* to) {
  if (type == DType::kF32) return gather<uint32_t>(from, at, count, head_dim, to);
  if (type == DType::kF8E4M3) return gather<uint8_t>(from, at, count, head_dim + 1, to);
  gather<uint16_t>(from, at, count, head_dim, to);
}

}  // namespace

IndexedPlan::IndexedPlan(const AttentionShape& shape, const IndexShape& index, DType kv_type, int threads,
                         Arena& arena)
    : index_(index),
      max_context_(whole_pages(shape.max_context) * kBlockTokens),
      row_blocks_(whole_pages(index.top)),
      block_bytes_(keys_bytes(kv_type, shape.head_dim)),
      head_dim_(shape.head_dim),
      rows_at_once_(indexed_rows(
          shape, row_blocks_ * block_bytes_ + max_context_ * static_cast<int64_t>(sizeof(float)), threads)),
      rows_plan_(shape_of_indexed(shape, index, rows_at_once_), threads, arena) {
  MILLRACE_CHECK(shape.shared_values && kv_type != DType::kQ8_0);
  sequences_ = arena.take<AttentionSequence>(rows_at_once_);
  tables_ = arena.take<const int32_t*>(rows_at_once_);
  blocks_ = arena.take<int32_t>(rows_at_once_ * row_blocks_);
  chosen_keys_ = arena.take<uint8_t>(rows_at_once_ * row_blocks_ * block_bytes_ + kChosenSlack);
  scores_ = arena.take<float>(rows_at_once_ * max_context_);
  page_keys_ = arena.take<float>(threads * index.dim * int64_t{kBlockTokens});
  order_ = arena.take<uint64_t>(threads * max_context_);
}

// One layer's.
class IndexedRun {
 public:
  IndexedRun(const Context& ctx, const AttentionPlan& plan, IndexedPlan& indexed, const IndexedAttention& op)
      : ctx_(ctx), plan_(plan), indexed_(indexed), op_(op) {}

  void run() {
    const std::span<const int32_t> rows = plan_.sparse_rows();
    const auto at_once = static_cast<size_t>(indexed_.rows_at_once_);
    for (size_t done = 0; done < rows.size(); done += at_once)
      attend(rows.subspan(done, std::min(rows.size() - done, at_once)));
  }

 private:
  void attend(std::span<const int32_t> rows);
  void score(int64_t slot, int32_t row, int64_t first_page, int64_t last_page, int thread) const;
  void choose(int64_t slot, int32_t row, int thread) const;

  const Context& ctx_;
  const AttentionPlan& plan_;
  IndexedPlan& indexed_;
  const IndexedAttention& op_;
};

void IndexedRun::score(int64_t slot, int32_t row, int64_t first_page, int64_t last_page, int thread) const {
  const IndexShape& index = indexed_.index_;
  const PagedKv& kv = op_.index_keys;
  const int32_t* table = kv.tables[plan_.sequence_of()[row]];
  float* keys = indexed_.page_keys_ + thread * index.dim * int64_t{kBlockTokens};
  for (int64_t page = first_page; page < last_page; ++page) {
    const uint8_t* stored = kv.pool + table[page] * kv.block_bytes + kv.key_offset;
    for (int64_t d = 0; d < index.dim; ++d)
      load_key_dimension(kv.type, stored, index.dim, d, keys + d * kBlockTokens);
    // Behind the row's own token there may be anything: nobody looks at these scores.
    ctx_.kernels.index_scores({keys, index.heads, index.dim,
                               op_.query + row * int64_t{index.heads} * index.dim,
                               op_.weights + row * int64_t{index.heads},
                               indexed_.scores_ + slot * indexed_.max_context_ + page * kBlockTokens});
  }
}

// From scores to a copy of the chosen tokens' keys, in the order of their positions.
void IndexedRun::choose(int64_t slot, int32_t row, int thread) const {
  const PagedKv& kv = op_.attention.kv;
  const int32_t visible = plan_.positions()[row] + 1, top = indexed_.index_.top;
  MILLRACE_CHECK(visible > top && visible <= indexed_.max_context_);
  const float* scores = indexed_.scores_ + slot * indexed_.max_context_;
  uint64_t* order = indexed_.order_ + thread * indexed_.max_context_;
  for (int32_t p = 0; p < visible; ++p)  // of equals the earlier is the larger number
    order[p] = uint64_t{in_order(scores[p])} << 32 | (UINT32_MAX - static_cast<uint32_t>(p));
  std::nth_element(order, order + top, order + visible, std::greater<>());
  for (int32_t i = 0; i < top; ++i) order[i] = UINT32_MAX - static_cast<uint32_t>(order[i]);
  std::sort(order, order + top);
  const int32_t* table = kv.tables[plan_.sequence_of()[row]];
  uint8_t* to = indexed_.chosen_keys_ + slot * indexed_.row_blocks_ * indexed_.block_bytes_;
  for (int32_t first = 0; first < top; first += kBlockTokens, to += indexed_.block_bytes_) {
    const int32_t count = std::min(kBlockTokens, top - first);
    const uint8_t* from[kBlockTokens];
    int32_t at[kBlockTokens];
    for (int32_t i = 0; i < count; ++i) {
      const auto position = static_cast<int32_t>(order[first + i]);
      from[i] = kv.pool + table[position / kBlockTokens] * kv.block_bytes + kv.key_offset;
      at[i] = position % kBlockTokens;
    }
    if (count < kBlockTokens) std::memset(to, 0, static_cast<size_t>(indexed_.block_bytes_));
    gather_keys(kv.type, from, at, count, indexed_.head_dim_, to);
  }
}

void IndexedRun::attend(std::span<const int32_t> rows) {
  int64_t parts = 1;
  const auto pages_of = [&](int32_t row) { return whole_pages(plan_.positions()[row] + 1); };
  for (const int32_t row : rows)
    parts = std::max(parts, (pages_of(row) + kIndexPagesPerTask - 1) / kIndexPagesPerTask);
  ctx_.pool.parallel_for(std::ssize(rows) * parts, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t slot = task / parts, first = task % parts * kIndexPagesPerTask;
      const int32_t row = rows[static_cast<size_t>(slot)];
      score(slot, row, first, std::min(pages_of(row), first + kIndexPagesPerTask), thread);
    }
  });
  ctx_.pool.parallel_for(std::ssize(rows), 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t slot = begin; slot < end; ++slot) choose(slot, rows[static_cast<size_t>(slot)], thread);
  });
  // A context of its own for each row.
  for (size_t i = 0; i < rows.size(); ++i) {
    int32_t* blocks = indexed_.blocks_ + static_cast<int64_t>(i) * indexed_.row_blocks_;
    for (int64_t b = 0; b < indexed_.row_blocks_; ++b)
      blocks[b] = static_cast<int32_t>(static_cast<int64_t>(i) * indexed_.row_blocks_ + b);
    indexed_.tables_[i] = blocks;
    indexed_.sequences_[i] = {rows[i], 1, indexed_.index_.top - 1};
  }
  indexed_.rows_plan_.begin_rows({indexed_.sequences_, rows.size()});
  PagedAttention of_chosen = op_.attention;
  of_chosen.kv.pool = indexed_.chosen_keys_;
  of_chosen.kv.num_blocks = static_cast<int32_t>(std::ssize(rows) * indexed_.row_blocks_);
  of_chosen.kv.block_bytes = indexed_.block_bytes_;
  of_chosen.kv.key_offset = of_chosen.kv.value_offset = 0;
  of_chosen.kv.tables = indexed_.tables_;
  paged_attention(ctx_, indexed_.rows_plan_, of_chosen);
}

void append_index_keys(const Context& ctx, const AttentionPlan& plan, const AppendIndexKeys& op) {
  ctx.pool.parallel_for(op.rows, kIndexRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const float *cosines = op.cosines + row * op.half, *sines = op.sines + row * op.half;
      float *queries = op.query + row * op.heads * op.dim, *key = op.key + row * op.dim;
      for (int64_t h = 0; h < op.heads; ++h) rotate(queries + h * op.dim, cosines, sines, op.half, false);
      rotate(key, cosines, sines, op.half, false);
      store_kv(op.index_keys, plan.sequence_of()[row], plan.positions()[row], 0, op.dim, key, nullptr);
    }
  });
}

void indexed_attention(const Context& ctx, const AttentionPlan& plan, IndexedPlan& indexed,
                       const IndexedAttention& op) {
  MILLRACE_CHECK(op.attention.kv.one_head);
  IndexedRun(ctx, plan, indexed, op).run();
}

}  // namespace millrace::cpu
