// Latent attention over the tokens that an indexer chooses (DeepSeek 3.2; NormLatentQkv::index_q): scores of
// all cached index keys, the `top` largest of them, and a copy of the chosen tokens' keys that the kernels of
// latent attention read as if they were the whole context. What a row chooses depends on its own queries and
// on the keys before it. Pointers are device memory; launches are asynchronous on the stream.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/attention/attention.h"

namespace millrace::cuda {

// Tokens whose scores a CTA makes.
inline constexpr int32_t kIndexTile = 64;

struct IndexedRows {
  LayerCache cache;  // latent keys; positions and sequence_of begin with the first of the rows
  // The indexer's: heads its query heads, head_dim its keys' size, the same rows. In CacheOrder::kRows.
  LayerCache index;
  const float *query = nullptr, *weights = nullptr;  // [rows, index heads, index dim], [rows, index heads]
  int32_t rows = 0, top = 0;
  int32_t context = 0;        // stride of scores, at least the longest context
  int32_t most_seen = 0;      // positions that any row sees, at most
  float* scores = nullptr;    // [rows, context]
  int32_t* tokens = nullptr;  // [rows, top]
  void* chosen = nullptr;     // [rows, blocks of top] blocks of one layer's latent keys
  int32_t* blocks = nullptr;  // [rows, blocks of top]: their numbers
  // What the attention kernels read: a row that sees no more than `top` has all of them copied.
  const int32_t** tables = nullptr;  // [rows]
  int32_t* positions = nullptr;      // [rows]
};
// Elements of a block of `chosen`; bytes of one row's arrays, of elements of so many bytes.
int64_t indexed_block_elements(DType type, int32_t dim);
size_t indexed_row_bytes(const IndexedRows& shape);

// Scores, choice and copy, a kernel each. Floor: index_dim * sizeof type a token of context, and twice the
// chosen keys, / B; far from it: scores are index_heads * index_dim multiply-adds a token on the CUDA cores.
void launch_choose_tokens(const IndexedRows& op, const Launch& at);

}  // namespace millrace::cuda
