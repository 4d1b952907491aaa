// What the block manager (kv/) and the backends must agree on about the paged KV cache.
#pragma once

#include <cstdint>

namespace millrace {

inline constexpr int32_t kBlockTokens = 16;  // tokens per KV block, everywhere
inline constexpr int32_t kNoBlock = -1;      // table entry of a block that has left its window
inline constexpr int kMaxKvGroups = 4;       // groups of layers that remember alike (full, window, ...)

inline constexpr int32_t blocks_for(int64_t tokens) {
  return static_cast<int32_t>((tokens + kBlockTokens - 1) / kBlockTokens);
}

}  // namespace millrace
