// Everything an executor writes besides the KV pools, laid out once from the spec; no step allocates.
#pragma once

#include "backend/backend.h"
#include "backend/cpu/memory.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu {

// A few query tokens of one sequence that attend together, per KV head.
struct QueryTile {
  int32_t sequence, first_token, num_tokens;
};

// What one span of positions gave a query row.
struct Partial {
  float* largest;  // [rows]
  float* sum;      // [rows]
  float* values;   // [rows][padded_dim]
};

// One thread's own.
struct ThreadScratch {
  float* tile;          // [2][kMaxRowsPerPass][kMaxRowsPerTask]: outputs of a chunk before they are combined
  float* decoded;       // [kDecodedRows][widest input]
  float* scores;        // [kMaxHeads][tile rows][kTileTokens + kLanes]
  const float** query;  // [kMaxHeads][tile rows]
  const ActivationBlock** query_blocks;  // the same
  int32_t *first, *last;                 // [tile rows]
  Partial part, total;
};

struct Workspace {
  Workspace(const ExecutorSpec& spec, int threads, bool with_tiles, Arena& arena);

  // Shapes that follow from the spec.
  int64_t query_cols, kv_cols, padded_dim;
  int32_t group_size;       // query heads per KV head
  int32_t tokens_per_tile;  // of queries
  int32_t tile_rows;        // tokens_per_tile * group_size
  int64_t max_split_tiles;  // query tiles that may be split over their context
  int64_t max_spans;

  float *residual, *normed;  // [tokens][hidden]
  float *query, *attention;  // [tokens][heads * head_dim]
  float *key, *value;        // [tokens][kv_heads * head_dim]
  float* logits;             // [logit rows][vocab]
  // [tokens][max(hidden, heads * head_dim) / 32]: input of a product, or cells; and the queries, rotated,
  // where the cache is int8: after the product that made them, before the one that reads what they attended
  // to.
  ActivationBlock* blocks;
  float* inner;                   // [tokens][ffn] or [tokens * chosen][expert_ffn]
  ActivationBlock* inner_blocks;  // the same, quantized
  // For tables with tiles: what binary blocks a step of few tokens has, and tiles, of both inputs.
  ActivationBlock *input_binary, *inner_binary;
  uint16_t *input_tiles, *inner_tiles;
  float *cosines, *sines;  // [tokens][head_dim / 2]
  int32_t* positions;      // [tokens]
  int32_t* sequence_of;    // [tokens]
  QueryTile* tiles;        // [tokens]
  Partial split;           // [max_split_tiles * kv_heads * max_spans][tile_rows]

  // Experts.
  float* router_logits;   // [tokens][experts]
  int32_t* chosen;        // [tokens][chosen]
  float* chosen_weight;   // [tokens][chosen]
  int32_t* expert_start;  // [experts + 1]: where an expert's rows begin in sorted order
  int32_t* active;        // [experts]: experts with rows
  int32_t* sorted_token;  // [tokens * chosen]: token of a sorted row
  int32_t* sorted_at;     // [tokens * chosen]: sorted row of (token, slot)
  float* expert_out;      // [tokens * chosen][hidden], in sorted order

  ThreadScratch* threads;
};

// with_tiles: for a table that has to_tiles.
size_t workspace_bytes(const ExecutorSpec& spec, int threads, bool with_tiles);

}  // namespace millrace::cpu
