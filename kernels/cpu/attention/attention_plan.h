// The plan of a step's attention, made once and run by every layer: which rows form tiles of queries, and the
// workspace of partial softmaxes. It depends on the batch's shape and the number of threads, not on a layer.
#pragma once

#include <span>
#include <utility>

#include "base/paging.h"
#include "kernels/cpu/arena.h"
#include "kernels/cpu/attention/attention_mask.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu {

// What sizes the workspace.
struct AttentionShape {
  int32_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t max_rows = 0;           // of queries in a step
  int64_t max_context = 0;        // tokens of a sequence
  bool shared_values = false;     // values are the keys: AttentionSplit::shared_values
  bool split_over_ranks = false;  // SplitExchange
  bool sparse = false;            // some sequences may have sparse_pages
  int32_t index_top = 0;          // above 0: a token that sees more reads so many (indexed_attention.h)
};

// A sequence's rows of the batch are [first_row, first_row + num_tokens); the first of them stands at
// position context_len.
struct AttentionSequence {
  int32_t first_row, num_tokens, context_len;
  bool both_ways = false;           // each of these tokens sees up to the last of them
  int32_t second_text = INT32_MAX;  // position where a second text begins
  int32_t sparse_pages = 0;         // pages that a token reads in layers of full attention; 0: all

  // Does the token at `position` leave pages out in such layers?
  bool is_sparse(int32_t position) const {
    return sparse_pages > 0 && !both_ways && position / kBlockTokens + 1 > sparse_pages;
  }
};

// A few query tokens of one sequence that attend together, per KV head. A row of a tile is (token, head of
// the group).
struct QueryTile {
  int32_t sequence, first_token, num_tokens;
};

// Of the positions of a split, or of several.
struct PartialSoftmax {
  float* row_max;  // [rows]
  float* row_sum;  // [rows]: of exp(score - row_max)
  float* out;      // [rows][padded_dim]: values so weighted
};

// One thread's own.
struct AttentionScratch {
  float* scores;                         // [kMaxHeads][tile rows][kTileTokens + kLanes]
  const float** query;                   // [kMaxHeads][tile rows]
  const ActivationBlock** query_blocks;  // the same
  int32_t *first, *last;                 // [tile rows]
  PartialSoftmax part, total;
  float* shared_values = nullptr;  // [kTileTokens][head_dim] and kLanes more; absent where values are stored
};

class AttentionPlan {
 public:
  // The workspace is laid out in the arena.
  AttentionPlan(const AttentionShape& shape, int threads, Arena& arena);
  static size_t workspace_bytes(const AttentionShape& shape, int threads);

  // Sequences cover the rows, in order, and must outlive the step.
  void begin_step(std::span<const AttentionSequence> sequences);
  // A step of single tokens, a sequence each, in any order of rows: for a plan whose positions are not asked
  // for.
  void begin_rows(std::span<const AttentionSequence> sequences);
  // From now on only these rows, ascending, are attended from.
  void keep_rows(std::span<const int32_t> rows);

  // Splits [first, last) of the context that some token of the tile sees; window 0: everything.
  std::pair<int64_t, int64_t> splits_of(const QueryTile& tile, const AttentionMask& mask) const;

  const AttentionShape& shape() const { return shape_; }
  int64_t rows() const { return rows_; }
  int32_t longest_context() const { return longest_context_; }  // before the step
  std::span<const AttentionSequence> sequences() const { return sequences_; }
  std::span<const QueryTile> tiles() const { return {tiles_, static_cast<size_t>(num_tiles_)}; }
  // The same in a layer that is sparse where sequences are, or everywhere by its indexer: tiles of the tokens
  // that read everything, and the rows, ascending, of those that do not.
  std::span<const QueryTile> dense_tiles() const {
    return any_sparse_ ? std::span<const QueryTile>(dense_tiles_, static_cast<size_t>(num_dense_)) : tiles();
  }
  std::span<const int32_t> sparse_rows() const { return {sparse_rows_, static_cast<size_t>(num_sparse_)}; }
  bool any_sparse() const { return any_sparse_; }              // may some row be?
  const int32_t* positions() const { return positions_; }      // [rows]
  const int32_t* sequence_of() const { return sequence_of_; }  // [rows]

  int32_t group_size() const { return group_size_; }  // query heads per KV head
  int64_t padded_dim() const { return padded_dim_; }
  int32_t tile_rows() const { return tile_rows_; }
  // Query tiles that may be split over their context: more of them are tasks enough.
  int64_t max_split_tiles() const { return max_split_tiles_; }
  // [max_partials][tile_rows]: a tile, a KV head and a split each
  const PartialSoftmax& split_partials() const { return split_partials_; }
  int64_t max_partials() const { return max_partials_; }
  const AttentionScratch& scratch(int thread) const { return scratch_[thread]; }

 private:
  void add_token(QueryTile* tiles, int64_t& count, int32_t sequence, int32_t token) const;
  void note_row(int32_t row);
  bool is_indexed(int32_t position) const { return shape_.index_top > 0 && position >= shape_.index_top; }

  AttentionShape shape_;
  int32_t group_size_, tokens_per_tile_, tile_rows_;
  int64_t padded_dim_, max_split_tiles_, max_partials_;
  int32_t *positions_, *sequence_of_;
  QueryTile *tiles_, *dense_tiles_;
  int32_t* sparse_rows_;
  PartialSoftmax split_partials_;
  AttentionScratch* scratch_;  // [threads]

  std::span<const AttentionSequence> sequences_;
  int64_t rows_ = 0, num_tiles_ = 0, num_dense_ = 0, num_sparse_ = 0;
  bool any_sparse_ = false;
  int32_t longest_context_ = 0;
};

}  // namespace millrace::cpu
