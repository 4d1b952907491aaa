// The loop over a split of the context, a tile of 64 tokens at a time: which blocks a tile has, which are
// prefetched meanwhile, and how a row's results begin and end. All attention kernels use it.
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// Blocks or sixteens of dimensions at once.
constexpr int kAtOnce = Simd::kAttendAtOnce;

struct Tile {
  int32_t start;   // position of its first token
  int32_t lo, hi;  // blocks [lo, hi) of the tile that some row sees
  const uint8_t* block[kTileTokens / kLanes];
  const uint8_t* next[kTileTokens / kLanes];  // blocks of the tile behind, to be prefetched; or this one's
  const uint8_t* far[kTileTokens / kLanes];   // of the tile behind that
  bool cold = false;                          // the first of a split that nobody prefetched
};

inline int32_t clip(int32_t x) { return x < 0 ? 0 : x > kTileTokens ? kTileTokens : x; }

// The keys and values of a block, of all heads.
[[gnu::always_inline]] inline void prefetch_block(const AttentionSplit& s, const uint8_t* block) {
  for (int64_t at = 0; at < s.heads * s.head_bytes; at += 64) {
    __builtin_prefetch(block + s.key_offset + at, 0, 2);
    __builtin_prefetch(block + s.value_offset + at, 0, 2);
  }
}

// Rows that see something of the split begin with nothing.
inline void begin_rows(const AttentionSplit& s) {
  for (int r = 0; r < s.rows; ++r) {
    if (s.first[r] >= s.last[r]) continue;
    s.row_max[r] = -__builtin_inff();
    Simd::store(s.scores + r * static_cast<int64_t>(kTileTokens + kLanes) + kTileTokens, Simd::zero());
    for (int32_t c = 0; c < s.padded_dim; c += kLanes) {
      Simd::store(s.acc + r * static_cast<int64_t>(s.padded_dim) + c, Simd::zero());
    }
  }
}
inline void end_rows(const AttentionSplit& s) {
  for (int r = 0; r < s.rows; ++r) {
    if (s.first[r] >= s.last[r]) continue;
    s.row_sum[r] =
        Simd::reduce_sum(Simd::load(s.scores + r * static_cast<int64_t>(kTileTokens + kLanes) + kTileTokens));
  }
}

// What head h of a split has for itself.
inline AttentionSplit head_of(const AttentionSplit& s, int32_t h) {
  AttentionSplit head = s;
  const int64_t row = h * s.head_rows;
  head.key_offset += h * s.head_bytes;
  head.value_offset += h * s.head_bytes;
  head.query += h * s.rows;
  head.query_blocks += h * s.rows;
  head.row_max += row;
  head.row_sum += row;
  head.acc += row * s.padded_dim;
  head.scores += h * static_cast<int64_t>(s.rows) * (kTileTokens + kLanes);
  return head;
}

// attend_one(tile) for the tiles of a split, in order. loops_prefetch: attend_one prefetches tile.next.
template <class AttendOne>
[[gnu::always_inline]] inline void for_each_tile(const AttentionSplit& s, bool loops_prefetch,
                                                 const AttendOne& attend_one) {
  int32_t first = INT32_MAX, last = 0;
  for (int r = 0; r < s.rows; ++r) {
    if (s.first[r] >= s.last[r]) continue;
    first = s.first[r] < first ? s.first[r] : first;
    last = s.last[r] > last ? s.last[r] : last;
  }
  const int32_t end = (last + kTileTokens - 1) / kTileTokens * kTileTokens;
  for (int32_t start = first / kTileTokens * kTileTokens; start < last; start += kTileTokens) {
    Tile tile{start, clip(first - start) / kLanes, (clip(last - start) + kLanes - 1) / kLanes, {}, {}, {}};
    tile.cold = start <= first && !s.prefetched;
    // The next tiles' blocks lie elsewhere in the pool: they are prefetched while this one is computed. Loops
    // may do so, a line at a time: all at once they would keep a core's own loads waiting.
    constexpr int32_t kBlocks = kTileTokens / kLanes;
    for (int32_t b = 0; b < kBlocks; ++b) {
      const auto block = [&](int32_t tiles) -> const uint8_t* {
        const int32_t at = start + tiles * kTileTokens + b * kLanes;
        if (at < last) return s.pool + s.table[at / kLanes] * s.block_bytes;
        return at < end ? nullptr : s.next_blocks[(at - end) / kLanes];  // behind the split
      };
      const uint8_t *next = block(1), *far = kAtOnce > 1 ? block(2) : nullptr;
      if (!loops_prefetch && next != nullptr) prefetch_block(s, next);
      if (b < tile.lo || b >= tile.hi) continue;
      tile.block[b] = block(0);
      tile.next[b] = next != nullptr ? next : tile.block[b];
      tile.far[b] = far != nullptr ? far : tile.block[b];
    }
    if (loops_prefetch && tile.cold) {
      for (int32_t b = tile.lo; b < tile.hi; ++b) prefetch_block(s, tile.block[b]);
    }
    attend_one(tile);
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
