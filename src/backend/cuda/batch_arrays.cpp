#include "backend/cuda/batch_arrays.h"

#include <algorithm>

#include "base/check.h"
#include "base/sparse_pages.h"
#include "kernels/cuda/attention/key_tiles.h"

namespace millrace::cuda {
namespace {

int32_t length_after(const SequenceSlice& s) { return s.context_len + s.num_tokens; }
int32_t table_size(const SequenceSlice& s) { return blocks_for(length_after(s)); }

// The first logical block from which on every entry is a block of the pool.
int32_t first_held_block(const SequenceSlice& s, int group, int32_t num_blocks) {
  int32_t first = table_size(s);
  while (first > 0 && s.tables[group][first - 1] != kNoBlock) {
    MILLRACE_CHECK(s.tables[group][first - 1] >= 0 && s.tables[group][first - 1] < num_blocks);
    --first;
  }
  return first;
}

// Of a group of layers with a state: what the first new token reads is there, the state before its block and
// the rows of its block; of the new blocks some may not be kept.
int32_t first_held_state(const SequenceSlice& s, int group, int32_t num_blocks) {
  const int32_t own = s.context_len / kBlockTokens, first = std::max(0, own - 1);
  for (int32_t b = first; b < table_size(s); ++b) {
    const int32_t block = s.tables[group][b];
    MILLRACE_CHECK(block < num_blocks);
    MILLRACE_CHECK(block >= 0 || (block == kNoBlock && b * kBlockTokens >= s.context_len));
  }
  return first;
}

// The new tokens of a sequence are about to be written: their blocks must be there.
void check_slice(const SequenceSlice& s, int32_t expected_row, const ExecutorSpec& spec) {
  MILLRACE_CHECK(s.first_row == expected_row && s.num_tokens >= 0 && s.context_len >= 0);
  MILLRACE_CHECK(static_cast<int64_t>(s.context_len) + s.num_tokens <= spec.max_context);
}

// Tokens of a chunk: so many that every group's kernel takes them.
int32_t chunk_tokens(const ExecutorSpec& spec) {
  if (spec.latent.rank > 0) return latent_chunk_tokens(spec.heads);
  int32_t tokens = prefill_chunk_tokens(spec.heads, spec.kv_heads, spec.head_dim);
  for (int g = 0; g < static_cast<int>(spec.kv_groups.size()); ++g) {
    if (spec.kv_groups[static_cast<size_t>(g)].state) continue;
    tokens = std::min(tokens, prefill_chunk_tokens(spec.heads, spec.kv_heads_of(g), spec.head_dim_of(g)));
  }
  return tokens;
}

// Tokens that a row of the sequence reads at most, of those before it: of an indexer's choice, or pages.
int64_t read_tokens(const SequenceSlice& s, int32_t index_top) {
  if (index_top > 0) return index_top;
  return s.sparse_pages == 0 || s.both_ways ? INT32_MAX : int64_t{s.sparse_pages} * kBlockTokens;
}
// Of a sequence's new tokens how many read everything; the others choose.
int32_t dense_tokens(const SequenceSlice& s, int32_t index_top) {
  return static_cast<int32_t>(
      std::clamp<int64_t>(read_tokens(s, index_top) - s.context_len, 0, s.num_tokens));
}

}  // namespace

BatchArrays::BatchArrays(const Batch& batch, const ExecutorSpec& spec)
    : batch_(batch),
      max_rows_(static_cast<size_t>(spec.max_tokens)),
      max_logit_rows_(static_cast<size_t>(spec.max_logit_rows)),
      num_groups_(static_cast<int>(spec.kv_groups.size())),
      has_adapters_(spec.adapter_rank > 0),
      has_budgets_(spec.page_summaries),
      index_top_(spec.latent.index_top) {
  MILLRACE_CHECK(batch.tokens.size() <= max_rows_);
  MILLRACE_CHECK(batch.logit_rows.size() <= max_logit_rows_);
  MILLRACE_CHECK(num_groups_ <= kMaxKvGroups);
  MILLRACE_CHECK(batch.sampled_rows.empty() || batch.sampled_rows.size() == batch.tokens.size());
  for (const int32_t row : batch.sampled_rows) MILLRACE_CHECK(row >= -1 && row < spec.max_logit_rows);
  for (const int32_t row : batch.logit_rows) {
    MILLRACE_CHECK(row >= 0 && static_cast<size_t>(row) < batch.tokens.size());
  }
  int32_t covered = 0;
  for (const SequenceSlice& s : batch.sequences) {
    check_slice(s, covered, spec);
    covered += s.num_tokens;
    if (s.num_tokens == 0) continue;
    sequences_.push_back({&s, {}});
    single_tokens_ = single_tokens_ && s.num_tokens == 1 && batch.given.empty() && !s.both_ways;
    if (s.both_ways) both_ways_.push_back({s.first_row, s.num_tokens});
    adapted_ = adapted_ || (batch.adapters != nullptr && s.adapter >= 0);
    last_position_ = std::max(last_position_, length_after(s) - 1);
    MILLRACE_CHECK(s.sparse_pages == 0 || (has_budgets_ && s.sparse_pages >= kLeastSparsePages));
    sparse_ = sparse_ || s.sparse_pages > 0 || (index_top_ > 0 && length_after(s) > index_top_);
    most_tokens_ = std::max(most_tokens_, s.num_tokens);
  }
  MILLRACE_CHECK(static_cast<size_t>(covered) == batch.tokens.size());
  MILLRACE_CHECK(has_adapters_ || !adapted_);

  size_ = tables();
  for (int g = 0; g < num_groups_; ++g) {
    for (SlicedSequence& s : sequences_) {
      const KvGroupSpec& group = spec.kv_groups[g];
      s.first_held[g] = group.state ? first_held_state(*s.slice, g, group.num_blocks)
                                    : first_held_block(*s.slice, g, group.num_blocks);
      MILLRACE_CHECK(s.first_held[g] <= s.slice->context_len / kBlockTokens);
      size_ += static_cast<size_t>(table_size(*s.slice));
    }
  }
  find_sparse_rows();
  cut_chunks(chunk_tokens(spec));
  if (!chunks_.empty()) {
    chunks_at_ = (size_ + 3) / 4 * 4;
    size_ = chunks_at_ + 4 * (chunks_.size() + dense_chunks_.size());
  }
  lengths_at_ = size_;
  if (!single_tokens_) size_ += 2 * sequences_.size() + 1;
}

void BatchArrays::find_sparse_rows() {
  const auto add = [](std::vector<RowRange>& to, int32_t first, int32_t count) {
    if (count == 0) return;
    if (!to.empty() && to.back().first + to.back().count == first) {
      to.back().count += count;
    } else {
      to.push_back({first, count});
    }
  };
  for (const SlicedSequence& sequence : sequences_) {
    const SequenceSlice& s = *sequence.slice;
    const int32_t dense = dense_tokens(s, index_top_);
    if (dense > 0) last_read_ = std::max(last_read_, s.context_len + dense - 1);
    if (dense < s.num_tokens)
      last_read_ = std::max(last_read_, static_cast<int32_t>(read_tokens(s, index_top_)) - 1);
    if (!sparse_) continue;
    add(dense_rows_, s.first_row, dense);
    add(sparse_rows_, s.first_row + dense, s.num_tokens - dense);
  }
}

void BatchArrays::cut_chunks(int32_t tokens) {
  if (single_tokens_ || tokens == 0) return;
  const auto cut = [&](std::vector<Chunk>& to, size_t sequence, int32_t count) {
    const SequenceSlice& s = *sequences_[sequence].slice;
    for (int32_t at = 0; at < count; at += tokens) {
      to.push_back({s.first_row + at, std::min(tokens, count - at), s.context_len + at,
                    static_cast<int32_t>(sequence)});
    }
  };
  for (size_t i = 0; i < sequences_.size(); ++i) {
    cut(chunks_, i, sequences_[i].slice->num_tokens);
    if (!sparse_rows_.empty()) cut(dense_chunks_, i, dense_tokens(*sequences_[i].slice, index_top_));
  }
  for (std::vector<Chunk>* chunks : {&chunks_, &dense_chunks_}) {
    std::stable_sort(chunks->begin(), chunks->end(), [](const Chunk& a, const Chunk& b) {
      return a.position + a.rows > b.position + b.rows;
    });
  }
}

void BatchArrays::fill(int32_t* out) const {
  std::copy(batch_.tokens.begin(), batch_.tokens.end(), out + tokens());
  std::fill_n(out + sampled_rows(), batch_.tokens.size(), -1);
  std::copy(batch_.sampled_rows.begin(), batch_.sampled_rows.end(), out + sampled_rows());
  std::copy(batch_.logit_rows.begin(), batch_.logit_rows.end(), out + logit_rows());
  for (size_t i = 0; i < sequences_.size(); ++i) {
    const SequenceSlice& s = *sequences_[i].slice;
    if (!single_tokens_) {
      out[lengths() + i] = length_after(s);
      out[row_starts() + i] = s.first_row;
    }
    for (int32_t t = 0; t < s.num_tokens; ++t) {
      out[positions() + s.first_row + t] = s.context_len + t;
      out[sequence_of() + s.first_row + t] = static_cast<int32_t>(i);
      if (has_adapters_) out[adapters() + s.first_row + t] = s.adapter;
      // Parts of an image read everything, and their pages are summarized.
      if (has_budgets_)
        out[budgets() + s.first_row + t] = s.sparse_pages > 0 && s.both_ways ? INT32_MAX : s.sparse_pages;
    }
  }
  if (!single_tokens_) out[row_starts() + sequences_.size()] = static_cast<int32_t>(batch_.tokens.size());
  for (size_t i = 0; has_adapters_ && i < batch_.logit_rows.size(); ++i) {
    out[logit_adapters() + i] = out[adapters() + batch_.logit_rows[i]];
  }
  size_t at = tables();
  for (int g = 0; g < num_groups_; ++g) {
    for (size_t i = 0; i < sequences_.size(); ++i) {
      const SequenceSlice& s = *sequences_[i].slice;
      out[table_starts(g) + i] = static_cast<int32_t>(at);
      std::copy_n(s.tables[g], table_size(s), out + at);
      at += static_cast<size_t>(table_size(s));
    }
  }
  int32_t* to = out + chunks_at_;
  for (const std::vector<Chunk>* chunks : {&chunks_, &dense_chunks_}) {
    for (const Chunk& chunk : *chunks) {
      for (const int32_t value : {chunk.first_row, chunk.rows, chunk.position, chunk.sequence}) *to++ = value;
    }
  }
}

bool BatchArrays::holds_window(int group, int32_t window) const {
  for (const SlicedSequence& s : sequences_) {
    const int32_t first_seen = window > 0 ? std::max(0, s.slice->context_len - window + 1) : 0;
    if (s.first_held[group] > first_seen / kBlockTokens) return false;
  }
  return true;
}

}  // namespace millrace::cuda
