#include "kernels/cpu/attention/attention_plan.h"

#include <algorithm>

#include "base/check.h"

namespace millrace::cpu {
namespace {

// Query rows (tokens times heads of a group) that share each load of keys and values. 32 rows of 64 scores
// and 64 values are 16 KiB: half of a first-level cache.
constexpr int32_t kTileRows = 32;

// Below this many tasks per thread attention is split over the context.
constexpr int64_t kSplitBelow = 4;

// Partial softmaxes (of a tile, a KV head and a split) that are kept at a time, unless a single tile has
// more: work enough for all threads, and a context of a million tokens does not take gigabytes.
constexpr int64_t kPartialsPerThread = 32;

PartialSoftmax take_partial(Arena& arena, int64_t rows, int64_t padded_dim) {
  return {arena.take<float>(rows), arena.take<float>(rows), arena.take<float>(rows * padded_dim)};
}

}  // namespace

AttentionPlan::AttentionPlan(const AttentionShape& shape, int threads, Arena& arena) : shape_(shape) {
  const int64_t kv_heads = std::max(1, shape.kv_heads);
  padded_dim_ = (shape.head_dim + kLanes - 1) / kLanes * kLanes;
  group_size_ = static_cast<int32_t>(shape.heads / kv_heads);
  tokens_per_tile_ = std::max(1, kTileRows / std::max(1, group_size_));
  tile_rows_ = tokens_per_tile_ * group_size_;
  const int64_t max_splits = (shape.max_context + kSplitTokens - 1) / kSplitTokens;
  max_split_tiles_ = max_splits < 2 ? 0 : std::min(shape.max_rows, (kSplitBelow * threads - 1) / kv_heads);
  max_partials_ = std::min(max_split_tiles_ * kv_heads * max_splits,
                           std::max(kPartialsPerThread * threads, kv_heads * max_splits));
  if (shape.split_over_ranks) max_partials_ = std::max(max_partials_, kv_heads * max_splits);
  positions_ = arena.take<int32_t>(shape.max_rows);
  sequence_of_ = arena.take<int32_t>(shape.max_rows);
  tiles_ = arena.take<QueryTile>(shape.max_rows);
  const bool leaves_out = shape.sparse || shape.index_top > 0;
  dense_tiles_ = arena.take<QueryTile>(leaves_out ? shape.max_rows : 0);
  sparse_rows_ = arena.take<int32_t>(leaves_out ? shape.max_rows : 0);
  split_partials_ = take_partial(arena, max_partials_ * tile_rows_, padded_dim_);
  scratch_ = arena.take<AttentionScratch>(threads);
  const int64_t scratch_rows = int64_t{kMaxHeads} * tile_rows_;
  for (int t = 0; t < threads; ++t) {
    AttentionScratch own{};
    own.scores = arena.take<float>(scratch_rows * (kTileTokens + kLanes));
    own.query = arena.take<const float*>(scratch_rows);
    own.query_blocks = arena.take<const ActivationBlock*>(scratch_rows);
    own.first = arena.take<int32_t>(tile_rows_);
    own.last = arena.take<int32_t>(tile_rows_);
    own.part = take_partial(arena, tile_rows_, padded_dim_);
    own.total = take_partial(arena, tile_rows_, padded_dim_);
    if (shape.shared_values) {
      own.shared_values = arena.take<float>(int64_t{kTileTokens} * shape.head_dim + kLanes);
    }
    if (scratch_ != nullptr) scratch_[t] = own;
  }
}

size_t AttentionPlan::workspace_bytes(const AttentionShape& shape, int threads) {
  Arena count(nullptr);
  const AttentionPlan layout(shape, threads, count);
  return count.used();
}

void AttentionPlan::begin_step(std::span<const AttentionSequence> sequences) {
  sequences_ = sequences;
  rows_ = num_tiles_ = num_dense_ = num_sparse_ = 0;
  longest_context_ = 0;
  any_sparse_ = false;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const int32_t first_row = sequences[i].first_row, num_tokens = sequences[i].num_tokens,
                  context_len = sequences[i].context_len;
    const auto s = static_cast<int32_t>(i);
    MILLRACE_CHECK(first_row == rows_ && context_len + num_tokens <= shape_.max_context);
    rows_ += num_tokens;
    MILLRACE_CHECK(rows_ <= shape_.max_rows);
    longest_context_ = std::max(longest_context_, context_len);
    for (int32_t t = 0; t < num_tokens; ++t) {
      positions_[first_row + t] = context_len + t;
      sequence_of_[first_row + t] = s;
    }
    for (int32_t t = 0; t < num_tokens; t += tokens_per_tile_) {
      tiles_[num_tiles_++] = {s, t, std::min(tokens_per_tile_, num_tokens - t)};
    }
    any_sparse_ |= sequences[i].sparse_pages > 0 || is_indexed(context_len + num_tokens - 1);
  }
  if (!any_sparse_) return;
  MILLRACE_CHECK(shape_.sparse || shape_.index_top > 0);
  for (int32_t row = 0; row < rows_; ++row) note_row(row);
}

void AttentionPlan::begin_rows(std::span<const AttentionSequence> sequences) {
  sequences_ = sequences;
  rows_ = num_tiles_ = 0;
  MILLRACE_CHECK(std::ssize(sequences) <= shape_.max_rows);
  for (const AttentionSequence& sequence : sequences) {
    MILLRACE_CHECK(sequence.num_tokens == 1 && sequence.context_len < shape_.max_context);
    tiles_[num_tiles_] = {static_cast<int32_t>(num_tiles_), 0, 1};
    ++num_tiles_;
  }
  rows_ = num_tiles_;
}

// One more token of a sequence, behind those before it.
void AttentionPlan::add_token(QueryTile* tiles, int64_t& count, int32_t sequence, int32_t token) const {
  if (count > 0) {
    QueryTile& last = tiles[count - 1];
    if (last.sequence == sequence && last.first_token + last.num_tokens == token &&
        last.num_tokens < tokens_per_tile_) {
      ++last.num_tokens;
      return;
    }
  }
  tiles[count++] = {sequence, token, 1};
}

// Where a layer of full attention does with it.
void AttentionPlan::note_row(int32_t row) {
  const AttentionSequence& sequence = sequences_[sequence_of_[row]];
  if (sequence.is_sparse(positions_[row]) || is_indexed(positions_[row])) {
    sparse_rows_[num_sparse_++] = row;
  } else {
    add_token(dense_tiles_, num_dense_, sequence_of_[row], row - sequence.first_row);
  }
}

void AttentionPlan::keep_rows(std::span<const int32_t> rows) {
  num_tiles_ = num_dense_ = num_sparse_ = 0;
  for (const int32_t row : rows) {
    MILLRACE_CHECK(row >= 0 && row < rows_);
    const int32_t sequence = sequence_of_[row], token = row - sequences_[sequence].first_row;
    add_token(tiles_, num_tiles_, sequence, token);
    if (any_sparse_) note_row(row);
  }
}

std::pair<int64_t, int64_t> AttentionPlan::splits_of(const QueryTile& tile, const AttentionMask& mask) const {
  const AttentionSequence& sequence = sequences_[tile.sequence];
  const int32_t from = sequence.context_len + tile.first_token;
  const int32_t length = sequence.context_len + sequence.num_tokens;
  const int32_t last = sequence.both_ways ? length : mask.last(from + tile.num_tokens - 1, length);
  return {mask.first(from) / kSplitTokens, (last - 1) / kSplitTokens + 1};
}

}  // namespace millrace::cpu
