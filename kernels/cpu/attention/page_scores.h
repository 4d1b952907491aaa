// Bounds of the scores that query rows have on pages of a cache, from the least and largest of the pages'
// keys: what sparse attention chooses pages by (base/sparse_pages.h). A page of one head is read once for
// four rows. 4 head_dim bytes of a page whose keys and values take 64 head_dim in bf16: a sixteenth of the
// traffic of full attention, and as much of its arithmetic.
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

template <int kR>
void score_page(const PageScores& s, const uint16_t* least, int32_t page, int32_t row) {
  const uint16_t* largest = least + s.padded_dim;
  const float *up = s.above + row * static_cast<int64_t>(s.padded_dim),
              *down = s.below + row * static_cast<int64_t>(s.padded_dim);
  V16 acc[kR];
  unroll<kR>([&](auto r) { acc[r] = Simd::zero(); });
  for (int32_t d = 0; d < s.padded_dim; d += kLanes) {
    const V16 high = LoadBF16::load(largest + d), low = LoadBF16::load(least + d);
    unroll<kR>([&](auto r) {
      acc[r] = Simd::fma(high, Simd::load(up + r * static_cast<int64_t>(s.padded_dim) + d), acc[r]);
      acc[r] = Simd::fma(low, Simd::load(down + r * static_cast<int64_t>(s.padded_dim) + d), acc[r]);
    });
  }
  unroll<kR>([&](auto r) { s.out[(row + r) * s.out_stride + page] = Simd::reduce_sum(acc[r]) * s.scale; });
}

inline void page_scores(const PageScores& s) {
  constexpr int32_t kAhead = 8;  // pages: their blocks lie anywhere
  const auto page_at = [&](int32_t page) { return s.summaries + s.table[page] * s.block_stride; };
  for (int32_t page = s.first; page < s.last; ++page) {
    if (page + kAhead < s.last) {
      const uint16_t* ahead = page_at(page + kAhead);
      for (int32_t at = 0; at < 2 * s.padded_dim; at += 32) __builtin_prefetch(ahead + at, 0, 3);
    }
    const uint16_t* least = page_at(page);
    int32_t row = 0;
    for (; row + 4 <= s.rows; row += 4) score_page<4>(s, least, page, row);
    for (; row + 2 <= s.rows; row += 2) score_page<2>(s, least, page, row);
    if (row < s.rows) score_page<1>(s, least, page, row);
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
