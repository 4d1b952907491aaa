#include "backend/cuda/batch_arrays.h"

#include <algorithm>

#include "base/check.h"

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

// The new tokens of a sequence are about to be written: their blocks must be there.
void check_slice(const SequenceSlice& s, int32_t expected_row, const ExecutorSpec& spec) {
  MILLRACE_CHECK(s.first_row == expected_row && s.num_tokens >= 0 && s.context_len >= 0);
  MILLRACE_CHECK(static_cast<int64_t>(s.context_len) + s.num_tokens <= spec.max_context);
}

}  // namespace

BatchArrays::BatchArrays(const Batch& batch, const ExecutorSpec& spec)
    : batch_(batch), rows_(batch.tokens.size()), num_groups_(static_cast<int>(spec.kv_groups.size())) {
  MILLRACE_CHECK(rows_ <= static_cast<size_t>(spec.max_tokens));
  MILLRACE_CHECK(batch.logit_rows.size() <= static_cast<size_t>(spec.max_logit_rows));
  MILLRACE_CHECK(num_groups_ <= kMaxKvGroups);
  for (const int32_t row : batch.logit_rows) MILLRACE_CHECK(row >= 0 && static_cast<size_t>(row) < rows_);
  int32_t covered = 0;
  for (const SequenceSlice& s : batch.sequences) {
    check_slice(s, covered, spec);
    covered += s.num_tokens;
  }
  MILLRACE_CHECK(static_cast<size_t>(covered) == rows_);

  size_ = 3 * rows_ + batch.logit_rows.size();
  for (int g = 0; g < num_groups_; ++g) {
    groups_[g].starts = size_;
    size_ += batch.sequences.size();
  }
  for (int g = 0; g < num_groups_; ++g) {
    groups_[g].tables = size_;
    for (const SequenceSlice& s : batch.sequences) {
      const int32_t first = first_held_block(s, g, spec.kv_groups[g].num_blocks);
      MILLRACE_CHECK(s.num_tokens == 0 || first <= s.context_len / kBlockTokens);
      groups_[g].first_held.push_back(first);
      size_ += static_cast<size_t>(table_size(s));
    }
  }
}

void BatchArrays::fill(int32_t* out) const {
  std::copy(batch_.tokens.begin(), batch_.tokens.end(), out + tokens());
  std::copy(batch_.logit_rows.begin(), batch_.logit_rows.end(), out + logit_rows());
  std::array<int32_t, kMaxKvGroups> start{};
  for (size_t i = 0; i < batch_.sequences.size(); ++i) {
    const SequenceSlice& s = batch_.sequences[i];
    for (int32_t t = 0; t < s.num_tokens; ++t) {
      out[positions() + s.first_row + t] = s.context_len + t;
      out[sequence_of() + s.first_row + t] = static_cast<int32_t>(i);
    }
    for (int g = 0; g < num_groups_; ++g) {
      out[table_starts(g) + i] = start[g];
      std::copy_n(s.tables[g], table_size(s), out + tables(g) + start[g]);
      start[g] += table_size(s);
    }
  }
}

bool BatchArrays::holds_window(int group, int32_t window) const {
  for (size_t i = 0; i < batch_.sequences.size(); ++i) {
    const SequenceSlice& s = batch_.sequences[i];
    if (s.num_tokens == 0) continue;
    const int32_t first_seen = window > 0 ? std::max(0, s.context_len - window + 1) : 0;
    if (groups_[group].first_held[i] > first_seen / kBlockTokens) return false;
  }
  return true;
}

}  // namespace millrace::cuda
