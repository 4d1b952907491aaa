// Sparse attention over the paged cache (base/sparse_pages.h has the rule): bounds of pages' keys, the pages
// that a row chooses by them, and tables of these that the attention kernels read as if they were the whole
// context. Pointers are device memory; launches are asynchronous on the stream.
//
// Of full attention's bytes a row reads budget / context for the chosen pages and 1/16 for the bounds of all:
// at 131,072 positions and a budget of 4,096 that is 3/32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/attention/attention.h"

namespace millrace::cuda {

// One layer's least and largest keys of each block, as bf16 rounded outwards: [blocks][kv_heads]
// [least, largest][padded_dim]. padded_dim is head_dim in whole sixteens; what is behind head_dim stays zero.
struct PageSummaries {
  uint16_t* data = nullptr;
  int32_t padded_dim = 0;
};

// Pages whose weights share a base: what one CTA makes of the bounds.
inline constexpr int32_t kSummaryTile = 128;

// Rows of the batch that choose, or have their own pages summarized. Strides are those of the longest
// context: `pages` of a row, in whole tiles.
struct SparseRows {
  LayerCache cache;  // of the rows: positions and sequence_of begin with the first of them
  PageSummaries summaries;
  const int32_t* budgets = nullptr;  // [rows]: pages; 0: all of them, and no page is summarized
  const float* query = nullptr;      // [rows, heads, dim], rotated
  float scale = 1.0f;
  int32_t rows = 0;
  int32_t pages = 0;         // stride, a multiple of kSummaryTile
  int32_t most_before = 0;   // full pages before any row's own, at most
  bool summarizes = false;   // rows that fill their own page also summarize it: nobody else reads it yet
  float* weights = nullptr;  // [rows, heads, pages]: of a page in its tile's softmax
  float2* tiles = nullptr;   // [rows, heads, pages / kSummaryTile]: largest bound, sum of weights
  // What the attention kernels read (LayerCache::head_tables): of a row within its budget its own table.
  int32_t* chosen = nullptr;         // [rows, kv_heads, pages]
  const int32_t** tables = nullptr;  // [rows, kv_heads]
  int32_t* positions = nullptr;      // [rows]
};
// Bytes of weights, tiles, chosen, tables and positions of one row.
size_t sparse_row_bytes(int32_t heads, int32_t kv_heads, int32_t pages);

// Two kernels: bounds and their softmax by tiles, a CTA for each row, KV head and tile; then the heaviest
// pages, of equals the earlier, a CTA for each row and KV head. Floor: 4 padded_dim bytes a page and KV head
// / B.
void launch_choose_pages(const SparseRows& op, const Launch& at);

// Of the pages that rows [0, op.rows) fill whose budgets are not 0; cache, summaries and budgets are read.
void launch_summarize_rows(const SparseRows& op, const Launch& at);
// Of one block, whatever is in it. Of `cache` no array of the batch is read.
void launch_summarize_block(const LayerCache& cache, const PageSummaries& to, int32_t block,
                            const Launch& at);

}  // namespace millrace::cuda
