// The rule of sparse attention: which pages of a long context a token reads. A page is a block of the KV
// cache (16 tokens). A token at position p stands on page p / 16; with a budget of n pages it reads, of its
// own page and those before it,
//   the first (attention's sink), the newest ones up to its own, and of the rest those that may matter most
// by the bounds of their keys, for each KV head by itself; and all of them while there are n or fewer. What
// it chooses depends on its own query and on the keys before it: on no other row, chunk or step.
//
// A page's bound for query q is sum_d max(q_d lo_d, q_d hi_d), lo and hi the least and largest of its keys in
// dimension d, as bf16 rounded outwards: no score on the page is above it, before soft caps, which are left
// out here because they make equals of what is above them. A head's bounds, times the scale of its scores,
// over the full pages before its own become a softmax; a page's weight is the sum of it over the query heads
// that share the KV head; the heaviest pages are read, of equals the earlier.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "base/float_bits.h"
#include "base/paging.h"

namespace millrace {

inline constexpr int32_t kSinkPages = 1;
// The sink, two new ones and one to choose.
inline constexpr int32_t kLeastSparsePages = 4;
inline constexpr int32_t kLeastSparseBudget = kLeastSparsePages * kBlockTokens;  // tokens

// Of a budget of `pages`, how many are the newest, the token's own among them.
constexpr int32_t newest_pages(int32_t pages) { return std::max(2, pages / 4); }

// Of a token's own page and those before it, `all`, which it chooses from: [kSinkPages, all - newest); and
// how many. Only where all > pages.
struct PageChoice {
  int32_t first, last, wanted;
};
constexpr PageChoice page_choice(int32_t pages, int32_t all) {
  const int32_t newest = newest_pages(pages);
  return {kSinkPages, all - newest, pages - newest - kSinkPages};
}

// The bf16 at or below x, at or above x; a NaN stays one.
inline uint16_t bf16_below(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return to_bfloat16(x).bits;
  return static_cast<uint16_t>((u >> 31) != 0 ? (u + 0xffffu) >> 16 : u >> 16);
}
inline uint16_t bf16_above(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return to_bfloat16(x).bits;
  return static_cast<uint16_t>((u >> 31) != 0 ? u >> 16 : (u + 0xffffu) >> 16);
}

}  // namespace millrace
