// Attention over a paged cache, plainly: float32 keys and values, rounded to what a cache of another type
// gives back; scores, softmax and sums in double.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor/dtype.h"

namespace millrace::reference {

// One layer's keys and values: a block holds [key, value][kv_heads][16][head_dim] from layer_offset on.
struct PagedKv {
  DType type = DType::kF32;  // what values are rounded to when they are stored
  float* pool = nullptr;
  int64_t block_floats = 0;  // from one block to the next
  int64_t layer_offset = 0;  // floats
  int32_t kv_heads = 0, head_dim = 0;
  int32_t parts = 2;  // 1: values are the keys, and a block has these alone
};

// The cached key (part 0) or value (part 1) of one head at one position, [head_dim]. table: logical block ->
// block.
float* cached(const PagedKv& kv, const int32_t* table, int part, int head, int32_t position);

// One token's keys and values [kv_heads][head_dim] into the cache.
void append_kv(const PagedKv& kv, const int32_t* table, int32_t position, const float* key,
               const float* value);

struct Attention {
  PagedKv kv;
  const int32_t* table;
  int32_t heads;
  int32_t window;        // a token sees itself and the window - 1 before it; 0: everything
  float scale;           // of the scores
  const float* sinks;    // [heads], or absent: joins the softmax's denominator, contributes no value
  float softcap = 0.0f;  // scores become softcap * tanh(score / softcap); 0: they stay
  int32_t chunk = 0;     // a token sees what is in its chunk of so many positions, up to itself; 0: no chunks
  // Above 0, the length of the sequence: a token also sees those behind it, window - 1 of them or all.
  int32_t bidirectional_length = 0;
  bool both_ways = false;  // all of those behind it, whatever the window
  // Above 0, with full attention: of a longer context it reads so many pages (base/sparse_pages.h).
  int32_t sparse_pages = 0;
  // Of the positions up to the token's own, those that it reads; absent: all.
  const std::vector<bool>* chosen = nullptr;
};

// An indexer's choice for one token at `position` (NormLatentQkv::index_q): the `top` largest scores, of
// equals the earlier. keys: one head of dim; query, weights: [heads][dim], [heads].
struct Indexer {
  PagedKv keys;
  const int32_t* table;
  int32_t heads, top;
};
std::vector<bool> indexed_tokens(const Indexer& op, int32_t position, const float* query,
                                 const float* weights);

// One token at `position`: query, out [heads][head_dim].
void attend(const Attention& op, int32_t position, const float* query, float* out);

}  // namespace millrace::reference
