// Sparse attention over a paged cache: each row reads the pages that base/sparse_pages.h chooses for it, for
// each KV head by itself. Bounds of all pages, a choice of some, and paged_attention over these as if they
// were the whole context: a row with few pages would have the bits that it has without.
#pragma once

#include <span>

#include "kernels/cpu/arena.h"
#include "kernels/cpu/attention/attention_plan.h"
#include "kernels/cpu/attention/page_summary.h"
#include "kernels/cpu/attention/paged_attention.h"
#include "kernels/cpu/context.h"

namespace millrace::cpu {

// The workspace of a step's sparse rows, some of them at a time.
class SparsePlan {
 public:
  SparsePlan(const AttentionShape& shape, int threads, Arena& arena);

 private:
  friend class SparseRun;
  AttentionShape shape_;
  int64_t max_pages_, rows_at_once_, slots_;
  AttentionPlan rows_plan_;       // of rows_at_once_ rows, a sequence each
  AttentionSequence* sequences_;  // [rows at once]
  const int32_t** tables_;        // [rows at once][kv heads] -> chosen blocks
  int32_t* chosen_;               // [rows at once][kv heads][max pages]
  float* scores_;                 // [slots][group][max pages]
  float* queries_;                // [slots][above, below][group][padded_dim]
  float* weights_;                // [threads][max pages]
  uint64_t* order_;               // [threads][max pages]
};

// The rows of plan.sparse_rows(). op.mask is of full attention.
void sparse_attention(const Context& ctx, const AttentionPlan& plan, SparsePlan& sparse,
                      const PagedAttention& op, const PageSummaries& summaries);

}  // namespace millrace::cpu
