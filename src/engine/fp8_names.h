// What the cache knows tokens by that FP8 products computed: ids of their own, so that blocks computed one
// way and the other have different names, whole or in part, in every tier.
#pragma once

#include <cstdint>
#include <span>

#include "base/buffer_pool.h"
#include "kv/cache.h"

namespace millrace {

// A bit that no vocabulary reaches. Twice: the token.
inline int32_t fp8_name(int32_t token) { return token ^ (1 << 30); }

// `tokens` of a prompt, those at positions before fp8_until by their names. `first`: the first one's
// position.
template <class Vector>
void name_tokens(std::span<const int32_t> tokens, int32_t first, int32_t fp8_until, Vector& names) {
  names.clear();
  for (const int32_t token : tokens) names.push_back(first++ < fp8_until ? fp8_name(token) : token);
}

// Cache::advance of tokens of which some may be named. names: room that is kept.
inline void advance_named(kv::Cache& cache, kv::Sequence& sequence, std::span<const int32_t> tokens,
                          int32_t fp8_until, Buffer<int32_t>& names) {
  if (sequence.length() >= fp8_until) return cache.advance(sequence, tokens);
  name_tokens(tokens, sequence.length(), fp8_until, names);
  cache.advance(sequence, names);
}

}  // namespace millrace
