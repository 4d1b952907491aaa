// Attention over a paged cache for a ragged batch: prompts, chunks of prompts and single rows in one call.
//
// A task is a tile of query tokens and one KV head. Its context is cut into splits of 512 positions, counted
// from the sequence's start; each split gives a partial softmax, and partials are combined in order. A step
// with too few tasks for its threads gives the splits to different threads and combines afterwards: the same
// numbers either way.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "kernels/cpu/attention/attention_mask.h"
#include "kernels/cpu/attention/attention_plan.h"
#include "kernels/cpu/attention/paged_kv.h"
#include "kernels/cpu/context.h"

namespace millrace::cpu {

struct PagedAttention {
  const float* query;                   // [rows][heads][head_dim]
  const ActivationBlock* query_blocks;  // of an int8 cache: the same, quantized
  float* out;                           // [rows][heads][head_dim]
  PagedKv kv;
  AttentionMask mask;
  float scale;           // of the scores
  const float* sinks;    // [heads], or absent: joins the softmax's denominator, contributes no value
  float softcap = 0.0f;  // scores become softcap * tanh(score / softcap); 0: they stay
};

// The plan's tiles, or some of them.
void paged_attention(const Context& ctx, const AttentionPlan& plan, const PagedAttention& op,
                     std::span<const QueryTile> tiles);
void paged_attention(const Context& ctx, const AttentionPlan& plan, const PagedAttention& op);

// A context whose splits are on several ranks, each of which has the same queries: a rank attends to its own
// splits, partial softmaxes are exchanged, and every rank combines all of them, in the order of one process.
struct SplitPart {
  int64_t split;
  int32_t rows;
  PartialSoftmax at;  // [rows], [rows], [rows][padded_dim]
};
struct SplitExchange {
  std::function<bool(int64_t split)> is_here;
  // Parts of all ranks, in an order that is the same on all of them; those of splits that are not here are to
  // be filled in.
  std::function<void(std::span<const SplitPart> parts)> exchange;
};
// Splits of tables that lack blocks must not be here. The plan's shape has split_over_ranks.
void paged_attention_over_ranks(const Context& ctx, const AttentionPlan& plan, const PagedAttention& op,
                                std::span<const QueryTile> tiles, const SplitExchange& ranks);

// The same in steps, for queries of any rank: keys and values of some splits are here now, others come later,
// and a row's partial softmaxes are put together, in order, when they all are there.
struct PlacedTile {
  QueryTile tile;  // of `sequences`
  int64_t row;     // of its first token and head in arrays of [kv_heads][head_rows]
};
struct PlacedSplit {
  int64_t split;
  int64_t at;  // which of the arrays is its
};
struct SplitSums {
  std::span<const AttentionSequence> sequences;
  std::span<const PlacedTile> tiles;
  int64_t head_rows = 0;   // tokens x heads of a group
  PartialSoftmax parts{};  // [splits][kv_heads][head_rows]
};
// Every tile's partial softmaxes of these splits, as far as it sees them.
void attend_splits(const Context& ctx, const AttentionPlan& plan, const PagedAttention& op,
                   const SplitSums& sums, std::span<const PlacedSplit> splits);
// totals, [kv_heads][head_rows], += parts of splits [first, last), which lie in this order. fresh: there are
// no totals yet; finish: they become rows of op.out.
struct CombineSplits {
  int64_t first = 0, last = 0;
  PartialSoftmax totals{};
  bool fresh = false, finish = false;
};
void combine_splits(const Context& ctx, const AttentionPlan& plan, const PagedAttention& op,
                    const SplitSums& sums, const CombineSplits& combine);

// Queries [rows][heads * head_dim] as an int8 cache reads them; head_dim is a multiple of 32.
void quantize_queries(const Context& ctx, const AttentionPlan& plan, const float* query,
                      ActivationBlock* query_blocks);

}  // namespace millrace::cpu
