#include "kernels/cpu/attention/page_summary.h"

#include <cmath>

#include "base/check.h"
#include "base/sparse_pages.h"

namespace millrace::cpu {

void summarize_page(const PagedKv& kv, int32_t block, const PageSummaries& to) {
  MILLRACE_CHECK(block >= 0 && block < kv.num_blocks);
  for (int64_t head = 0; head < to.kv_heads; ++head) {
    const uint8_t* keys = kv.pool + block * kv.block_bytes + kv.key_offset + head * kv.head_bytes;
    uint16_t* least_of = to.of(block, head);
    uint16_t* largest_of = least_of + to.padded_dim();
    for (int32_t d = 0; d < to.head_dim; ++d) {
      float key[kBlockTokens];
      load_key_dimension(kv.type, keys, to.head_dim, d, key);
      float least = key[0], largest = key[0];
      bool number = !std::isnan(key[0]);
      for (int t = 1; t < kBlockTokens; ++t) {
        least = key[t] < least ? key[t] : least;
        largest = key[t] > largest ? key[t] : largest;
        number = number && !std::isnan(key[t]);
      }
      // A page with a NaN has no bounds: it is chosen first, and its NaN is seen.
      if (!number) least = largest = std::nanf("");
      least_of[d] = bf16_below(least);
      largest_of[d] = bf16_above(largest);
    }
  }
}

void summarize_full_pages(const Context& ctx, const AttentionPlan& plan, const PagedKv& kv,
                          const PageSummaries& to) {
  ctx.pool.parallel_for(plan.rows(), kBlockTokens, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const int32_t sequence = plan.sequence_of()[row], position = plan.positions()[row];
      if (plan.sequences()[sequence].sparse_pages == 0 || position % kBlockTokens + 1 != kBlockTokens)
        continue;
      summarize_page(kv, kv.tables[sequence][position / kBlockTokens], to);
    }
  });
}

}  // namespace millrace::cpu
