// Attention over the tokens that an indexer chooses (DeepSeek 3.2; NormLatentQkv::index_q): scores of all
// cached index keys, the `top` largest of them, and paged_attention over a copy of the chosen tokens' keys as
// if they were the whole context. A row's choice depends on its own queries and on the keys before it alone.
//
// Limit: a row's scores cost index_heads * index_dim multiply-adds a token of context; the attention behind
// them is that of a context of `top` tokens, which the copy adds twice the bytes of its keys to.
#pragma once

#include <cstdint>

#include "kernels/cpu/arena.h"
#include "kernels/cpu/attention/attention_plan.h"
#include "kernels/cpu/attention/paged_attention.h"
#include "kernels/cpu/attention/paged_kv.h"
#include "kernels/cpu/context.h"

namespace millrace::cpu {

struct IndexShape {
  int32_t heads = 0, dim = 0, top = 0;
};

// Workspace, laid out in the arena. shape: of the step, whose values are its keys.
class IndexedPlan {
 public:
  IndexedPlan(const AttentionShape& shape, const IndexShape& index, DType kv_type, int threads, Arena& arena);

 private:
  friend class IndexedRun;

  IndexShape index_;
  int64_t max_context_, row_blocks_, block_bytes_, head_dim_, rows_at_once_;
  AttentionPlan rows_plan_;       // of rows with contexts of `top` tokens
  AttentionSequence* sequences_;  // [rows at once]
  const int32_t** tables_;        // [rows at once]
  int32_t* blocks_;               // [rows at once][row_blocks_]: 0, 1 ..
  uint8_t* chosen_keys_;          // [rows at once][row_blocks_] blocks of one head's keys
  float* scores_;                 // [rows at once][max context in whole pages]
  float* page_keys_;              // [threads][dim][16]
  uint64_t* order_;               // [threads][max context]
};

struct IndexedAttention {
  PagedAttention attention;      // kv: one head, whose values are its keys
  PagedKv index_keys;            // one head of index.dim
  const float *query, *weights;  // [rows][index heads][index dim], [rows][index heads]
};

// Index queries and keys of a step's rows, rotated by these angles in pairs (i, i + half), and the keys into
// the cache.
struct AppendIndexKeys {
  PagedKv index_keys;
  int64_t rows, heads, dim, half;
  const float *cosines, *sines;  // [rows][half]
  float *query, *key;            // [rows][heads][dim], [rows][dim]
};
void append_index_keys(const Context& ctx, const AttentionPlan& plan, const AppendIndexKeys& op);

// The rows of plan.sparse_rows(): those that see more than `top` tokens.
void indexed_attention(const Context& ctx, const AttentionPlan& plan, IndexedPlan& indexed,
                       const IndexedAttention& op);

}  // namespace millrace::cpu
