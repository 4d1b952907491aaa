// The spec of a rank's executor, of ranks that share rows and heads: what of the whole model's is its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "dist/shares.h"

namespace millrace {

// Its heads and KV heads, one of each where it has none.
inline ExecutorSpec rank_spec(const dist::Shares& shares, const ExecutorSpec& whole) {
  ExecutorSpec local = whole;
  const auto heads = shares.heads(whole.heads, whole.kv_heads);
  local.kv_heads = static_cast<int32_t>(std::max<int64_t>(1, heads.kv.size()));
  local.heads = static_cast<int32_t>(std::max<int64_t>(local.kv_heads, heads.query.size()));
  return local;
}

// [ranks + 1]: whose columns of attention's outputs are whose.
inline std::vector<int64_t> query_bounds(const dist::Shares& shares, const ExecutorSpec& whole) {
  std::vector<int64_t> bounds(static_cast<size_t>(shares.ranks()) + 1, 0);
  for (int r = 0; r < shares.ranks(); ++r) {
    bounds[static_cast<size_t>(r) + 1] =
        shares.heads_of(r, whole.heads, whole.kv_heads).query.end * whole.head_dim;
  }
  return bounds;
}

}  // namespace millrace
