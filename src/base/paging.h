// What the block manager (kv/) and the backends must agree on about the paged KV cache.
#pragma once

#include <cstdint>

namespace millrace {

inline constexpr int32_t kBlockTokens = 16;  // tokens per KV block, everywhere
inline constexpr int32_t kNoBlock = -1;      // table entry of a block that has left its window
inline constexpr int kMaxKvGroups = 4;       // groups of layers that remember alike (full, window, ...)

// Where a context is spread over ranks, a group's blocks stand on as many shelves, one of each rank: block id
// b is on shelf b % shelves, and a sequence's logical block i comes from shelf_of(i). Runs of kShelfBlocks
// are on one shelf, because attention adds up so many positions in one chain (cpu::kSplitTokens).
inline constexpr int32_t kShelfBlocks = 32, kMaxShelves = 16;
inline constexpr int kMaxKvCounts = kMaxKvGroups * kMaxShelves;  // numbers of blocks, per group and shelf
inline constexpr int32_t shelf_of(int32_t index, int32_t shelves) { return index / kShelfBlocks % shelves; }
// Of logical blocks [0, blocks), those on a shelf. The first one has the most.
inline constexpr int32_t blocks_on_shelf(int32_t blocks, int32_t shelf, int32_t shelves) {
  const int32_t round = kShelfBlocks * shelves, rest = blocks % round - shelf * kShelfBlocks;
  return blocks / round * kShelfBlocks + (rest < 0 ? 0 : rest > kShelfBlocks ? kShelfBlocks : rest);
}

inline constexpr int32_t blocks_for(int64_t tokens) {
  return static_cast<int32_t>((tokens + kBlockTokens - 1) / kBlockTokens);
}

}  // namespace millrace
