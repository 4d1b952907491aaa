// What an indexer makes of a page of 16 tokens (NormLatentQkv::index_q): a lane per token, one chain of fused
// multiply-adds over the dimensions for each head, one over the heads. The page's keys, 64 dim bytes, stay in
// the first-level cache for all heads: 16 heads dim multiply-adds a page, compute bound from a few heads on.
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// total += weights * max(0, query . keys) of kH heads from `head` on.
template <int kH>
V16 add_index_heads(const IndexScores& s, int32_t head, V16 total) {
  const float* query = s.query + static_cast<int64_t>(head) * s.dim;
  V16 acc[kH];
  unroll<kH>([&](auto h) { acc[h] = Simd::zero(); });
  for (int32_t d = 0; d < s.dim; ++d) {
    const V16 key = Simd::load(s.keys + static_cast<int64_t>(d) * kLanes);
    unroll<kH>([&](auto h) {
      acc[h] = Simd::fma(key, Simd::broadcast(query[h * static_cast<int64_t>(s.dim) + d]), acc[h]);
    });
  }
  unroll<kH>([&](auto h) {
    total = Simd::fma(Simd::max(acc[h], Simd::zero()), Simd::broadcast(s.weights[head + h]), total);
  });
  return total;
}

inline void index_scores(const IndexScores& s) {
  V16 total = Simd::zero();
  int32_t head = 0;
  for (; head + 4 <= s.heads; head += 4) total = add_index_heads<4>(s, head, total);
  for (; head < s.heads; ++head) total = add_index_heads<1>(s, head, total);
  Simd::store(s.out, total);
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
