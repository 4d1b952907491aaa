// What a kernel of attention over tensors gets (kernels/cpu/attention/flash_*.h): one tile of query rows, or
// of keys, of one sequence and KV head, and where its tensors lie. Plain data: tables include it.
#pragma once

#include <stdint.h>

namespace millrace::cpu {

// A tile has up to so many lanes, and takes so many rows of the other side at a time; both are counted from
// the first row of the sequence, so that the order of every sum is a matter of positions alone.
inline constexpr int32_t kFlashTile = 64;

// Sums over keys (and of dK and dV over queries) are cut into chunks of so many absolute positions, and
// chunks are merged in one fixed tree (flash_chunks.h): who computed a chunk, and when, changes no bit.
// MR_FLASH_CHUNK.
inline constexpr int32_t kFlashChunk = 256;

enum class FlashType : int32_t { kF32, kF16, kBF16, kFp8 };

// Rows [dim] of one sequence of a tensor.
struct FlashRows {
  uint8_t* data = nullptr;  // row 0, head 0; of pages: page 0
  int64_t row_bytes = 0, head_bytes = 0;
  FlashType type = FlashType::kF32;
  const int32_t* pages = nullptr;  // row / page_tokens -> page
  int64_t page_bytes = 0;
  int32_t page_tokens = 0;
  // kFp8: what the codes of (row, head) are multiplied by.
  const float* scales = nullptr;
  int64_t scale_row = 0, scale_head = 0;  // from one group of rows, one head, to the next
  int32_t rows_per_scale = 1;

  uint8_t* at(int64_t row, int64_t head) const {
    if (pages == nullptr) return data + row * row_bytes + head * head_bytes;
    return data + pages[row / page_tokens] * page_bytes + row % page_tokens * row_bytes + head * head_bytes;
  }
  float scale(int64_t row, int64_t head) const {
    return scales == nullptr ? 1.0f : scales[row / rows_per_scale * scale_row + head * scale_head];
  }
};

struct FlashSequence {
  FlashRows q, k, v, out;
  FlashRows d_out, d_q, d_k, d_v;  // backward
  int32_t q_len, k_len;
  int64_t shift;             // the position of query 0 less that of key 0
  int32_t q_chunk, k_chunk;  // the chunks that query 0 and key 0 begin
  // float32 [head][query], a head's row_stride apart; lse is absent where forward need not write it.
  float* lse;
  float* delta;  // backward: sum over dimensions of d_out * out
  int64_t row_stride;
};

struct FlashProblem {
  int32_t heads, kv_heads, head_dim, value_dim;
  float scale, softcap;               // softcap 0: none
  int32_t window_left, window_right;  // negative: open
  const float* sinks;                 // [heads], or absent
  // Block-sparse, or block_q 0: of (sequence, head, block of queries) the blocks of keys.
  int32_t block_q, block_k, q_blocks;
  const int32_t *row_starts, *columns;
  int32_t nodes;  // of the tree of chunks that a tile holds at once: flash_nodes()
};

// Keys [first, last) that a query sees.
struct FlashRange {
  int32_t first, last;
};
inline FlashRange visible_keys(const FlashProblem& p, const FlashSequence& s, int32_t query) {
  const int64_t position = query + s.shift;
  const int64_t low = p.window_left < 0 ? 0 : position - p.window_left;
  const int64_t high = p.window_right < 0 ? s.k_len : position + p.window_right + 1;
  const int64_t first = low < 0 ? 0 : low, last = high > s.k_len ? s.k_len : high;
  if (first >= last) return {0, 0};
  return {static_cast<int32_t>(first), static_cast<int32_t>(last)};
}

// Queries that see some key of [first, last): all of them lie in the range that comes back.
inline FlashRange seeing_queries(const FlashProblem& p, const FlashSequence& s, int32_t first, int32_t last) {
  const int64_t low = p.window_right < 0 ? 0 : int64_t{first} - p.window_right - s.shift;
  const int64_t high = p.window_left < 0 ? s.q_len : int64_t{last} + p.window_left - s.shift;
  const int64_t from = low < 0 ? 0 : low, to = high > s.q_len ? s.q_len : high;
  if (from >= to) return {0, 0};
  return {static_cast<int32_t>(from), static_cast<int32_t>(to)};
}

// Tiles of query rows (forward, delta, dQ): row r is query first + r / num_heads of head head + r %
// num_heads, so that the heads of a group share keys and values. Block-sparse tiles have one head, and a task
// lies in one block. Tiles of keys (dK, dV): keys [first, first + count) of kv_head. A task is up to
// kFlashTiles tiles of per_tile queries, or keys, each: they share what is read of the other side. How many
// they are changes no result.
inline constexpr int32_t kFlashTiles = 4;
struct FlashTask {
  const FlashProblem* problem;
  const FlashSequence* sequence;
  int32_t sequence_idx;
  int32_t head, num_heads, kv_head;
  int32_t first, count;  // count: query rows, or keys
  int32_t per_tile;
  float* scratch;  // flash_scratch_floats()

  // Tile i, of query rows (heads: num_heads) or of keys (1); its count is 0 behind the last.
  FlashTask tile(int32_t i, int32_t heads) const {
    const int32_t left = count / heads - i * per_tile, most = left < per_tile ? left : per_tile;
    FlashTask part = *this;
    part.first = first + i * per_tile;
    part.count = most < 0 ? 0 : most * heads;
    return part;
  }
};

// Rows [64][dims] of both sides; per tile lanes [dims][64] and sums [dims][64] of both, two tiles of scores,
// and nodes of the tree of chunks, [dims][64] of both with 64 log-sum-exps. 16 floats behind each: a vector
// behind the last dimension.
inline constexpr int64_t kFlashSlack = 16;
inline int64_t flash_scratch_floats(int64_t head_dim, int64_t value_dim, int64_t nodes) {
  const int64_t pair = kFlashTile * (head_dim + value_dim) + 2 * kFlashSlack;
  return pair + kFlashTiles * (2 * pair + 2 * kFlashTile * kFlashTile + nodes * (pair + kFlashTile));
}

// Nodes that are held at once over a span of so many positions: one for every level of a tree of its chunks,
// one more where the span crosses from one tree to the next, and the one that is put there.
inline int32_t flash_nodes(int64_t positions) {
  int32_t levels = 0;
  for (int64_t chunks = (positions + kFlashChunk - 1) / kFlashChunk; chunks > 0; chunks /= 2) ++levels;
  return levels + 2;
}

using FlashFn = void (*)(const FlashTask& task);

// Up to 16 rows of one head of two partials in memory, b into a (flash_chunks.h).
struct FlashMergeTask {
  float* out_a;  // [count], row_stride apart, of [dims]
  const float* out_b;
  float* lse_a;  // [count], or absent: gradients
  const float* lse_b;
  int64_t row_stride;
  int32_t count, dims;
};
using FlashMergeFn = void (*)(const FlashMergeTask& task);

// Up to 16 rows of one head of a partial to a tensor.
struct FlashFinishTask {
  const float* partial;  // [count], partial_stride apart, of [dims]
  const float* lse_in;   // [count], or absent
  int64_t partial_stride;
  FlashRows out;
  float* lse;  // [count], or absent
  float sink;
  bool has_sink;
  int32_t head, first, count, dims;
};
using FlashFinishFn = void (*)(const FlashFinishTask& task);

}  // namespace millrace::cpu
