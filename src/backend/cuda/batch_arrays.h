// What the kernels must know about a batch, as one array of int32 that goes to the device in one copy. The
// parts before the tables lie where the specification alone says, so that a recorded step finds them again:
//   tokens, positions, sequence_of, sampled_rows [max_tokens] each | logit_rows [max_logit_rows]
//   | per group: table_starts [max_tokens], from the array's begin
//   | where there are adapters: adapters [max_tokens], of each row, and logit_adapters [max_logit_rows], -1:
//   none | where there are page summaries: budgets [max_tokens], of each row in pages (attention/sparse.h)
//   | tables, one after another | chunks (attention/attention.h, PagedAttention), aligned to four, behind
//   them, where some rows choose pages, those of the others |
//   lengths, of sequences with this step's tokens, where one has several: else a row's position says it;
//     behind them the first row of each, and how many rows there are
// A sequence without tokens in the step is left out. No CUDA in here: tested without a device.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "backend/backend.h"

namespace millrace::cuda {

class BatchArrays {
 public:
  // Lays the batch out. What contradicts the specification (rows that no sequence covers, a table entry that
  // is no block of the pool) fails a check here rather than a read on the device.
  BatchArrays(const Batch& batch, const ExecutorSpec& spec);

  size_t size() const { return size_; }
  void fill(int32_t* out) const;  // [size()]; what lies between the parts is left as it is

  // Where the parts begin.
  size_t tokens() const { return 0; }
  size_t positions() const { return max_rows_; }
  size_t sequence_of() const { return 2 * max_rows_; }
  size_t sampled_rows() const { return 3 * max_rows_; }
  size_t logit_rows() const { return 4 * max_rows_; }
  size_t table_starts(int group) const { return 4 * max_rows_ + max_logit_rows_ + group * max_rows_; }
  size_t adapters() const { return table_starts(num_groups_); }
  size_t logit_adapters() const { return adapters() + max_rows_; }
  size_t budgets() const { return adapters() + (has_adapters_ ? max_rows_ + max_logit_rows_ : 0); }
  size_t tables() const { return budgets() + (has_budgets_ ? max_rows_ : 0); }

  size_t chunks() const { return chunks_at_; }
  int32_t num_chunks() const { return static_cast<int32_t>(chunks_.size()); }
  size_t dense_chunks() const { return chunks_at_ + 4 * chunks_.size(); }
  int32_t num_dense_chunks() const { return static_cast<int32_t>(dense_chunks_.size()); }
  size_t lengths() const { return lengths_at_; }
  size_t row_starts() const { return lengths_at_ + sequences_.size(); }
  int32_t num_sequences() const { return static_cast<int32_t>(sequences_.size()); }
  int32_t most_tokens() const { return most_tokens_; }  // of a sequence in this step

  // Rows of images that see one another, of each by themselves.
  struct RowRange {
    int32_t first, count;
  };
  const std::vector<RowRange>& both_ways() const { return both_ways_; }

  // Whether a sequence has sparse attention, or more tokens than its indexer reads; rows that choose pages
  // (base/sparse_pages.h) or tokens, and the others.
  bool sparse() const { return sparse_; }
  const std::vector<RowRange>& sparse_rows() const { return sparse_rows_; }
  const std::vector<RowRange>& dense_rows() const { return dense_rows_; }
  // The largest position of any row in what it reads: a choice is a context of its own.
  int32_t last_read() const { return last_read_; }

  // Whether a row of the batch has an adapter.
  bool adapted() const { return adapted_; }

  // Whether group `group` holds every position that a row with this window (0: everything) can see.
  bool holds_window(int group, int32_t window) const;
  // Has every sequence one token in this step, and is none of them given? Pieces of a sequence with images
  // are sequences here.
  bool single_tokens() const { return single_tokens_; }
  int32_t last_position() const { return last_position_; }  // the largest; -1 in an empty batch

 private:
  struct SlicedSequence {
    const SequenceSlice* slice;
    std::array<int32_t, kMaxKvGroups> first_held;  // from this logical block on the table has no gap
  };
  struct Chunk {
    int32_t first_row, rows, position, sequence;
  };
  void cut_chunks(int32_t tokens);  // of a chunk, at most
  void find_sparse_rows();

  Batch batch_;
  std::vector<SlicedSequence> sequences_;  // those with tokens
  std::vector<Chunk> chunks_, dense_chunks_;
  std::vector<RowRange> both_ways_, sparse_rows_, dense_rows_;
  size_t max_rows_ = 0, max_logit_rows_ = 0, size_ = 0, chunks_at_ = 0, lengths_at_ = 0;
  int num_groups_ = 0;
  bool single_tokens_ = true, has_adapters_ = false, adapted_ = false, has_budgets_ = false, sparse_ = false;
  int32_t last_position_ = -1, most_tokens_ = 0, last_read_ = -1, index_top_ = 0;
};

}  // namespace millrace::cuda
