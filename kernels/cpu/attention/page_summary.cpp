#include "kernels/cpu/attention/page_summary.h"

#include <bit>
#include <cmath>

#include "base/check.h"
#include "base/float_bits.h"
#include "base/sparse_pages.h"
#include "kernels/quant/kv_types.h"

namespace millrace::cpu {
namespace {

// Dimension d of the 16 keys of a head, as store_kv left them.
void load_keys(DType type, const uint8_t* keys, int64_t head_dim, int64_t d, float* to) {
  const int64_t at = d * kBlockTokens;
  switch (type) {
    case DType::kF32:
      for (int t = 0; t < kBlockTokens; ++t) to[t] = reinterpret_cast<const float*>(keys)[at + t];
      return;
    case DType::kF16:
      for (int t = 0; t < kBlockTokens; ++t)
        to[t] = to_float(Half{reinterpret_cast<const uint16_t*>(keys)[at + t]});
      return;
    case DType::kQ8_0: {  // scales [head_dim / 32][16], then codes [head_dim / 4][16][4]
      const auto* scales = reinterpret_cast<const uint16_t*>(keys);
      const auto* codes = reinterpret_cast<const int8_t*>(scales + head_dim / kKvScaleDims * kBlockTokens);
      for (int t = 0; t < kBlockTokens; ++t) {
        to[t] = static_cast<float>(codes[d / 4 * 4 * kBlockTokens + t * 4 + d % 4]) *
                to_float(Half{scales[d / kKvScaleDims * kBlockTokens + t]});
      }
      return;
    }
    case DType::kF8E4M3:  // scales [16], then codes [head_dim][16]
      for (int t = 0; t < kBlockTokens; ++t) {
        to[t] = to_float(Fp8E4M3{keys[kBlockTokens + at + t]}) * std::bit_cast<float>(fp8_scale(keys[t]));
      }
      return;
    default:
      for (int t = 0; t < kBlockTokens; ++t)
        to[t] = to_float(BFloat16{reinterpret_cast<const uint16_t*>(keys)[at + t]});
  }
}

}  // namespace

void summarize_page(const PagedKv& kv, int32_t block, const PageSummaries& to) {
  MILLRACE_CHECK(block >= 0 && block < kv.num_blocks);
  for (int64_t head = 0; head < to.kv_heads; ++head) {
    const uint8_t* keys = kv.pool + block * kv.block_bytes + kv.key_offset + head * kv.head_bytes;
    uint16_t* least_of = to.of(block, head);
    uint16_t* largest_of = least_of + to.padded_dim();
    for (int32_t d = 0; d < to.head_dim; ++d) {
      float key[kBlockTokens];
      load_keys(kv.type, keys, to.head_dim, d, key);
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
