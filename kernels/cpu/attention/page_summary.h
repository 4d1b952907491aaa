// The least and largest of a page's keys in each dimension, kept beside the KV pool for sparse attention
// (base/sparse_pages.h). They are made from the stored keys when a page is full, and again wherever its bytes
// come from: the same bytes give the same bounds.
#pragma once

#include <cstdint>

#include "kernels/cpu/attention/attention_plan.h"
#include "kernels/cpu/attention/paged_kv.h"
#include "kernels/cpu/context.h"

namespace millrace::cpu {

// One layer's: [num_blocks][kv_heads][least, largest][padded_dim], bf16; padded_dim is head_dim in whole
// sixteens, and what is behind head_dim stays zero.
struct PageSummaries {
  uint16_t* data = nullptr;
  int32_t kv_heads = 0, head_dim = 0;
  int32_t padded_dim() const { return (head_dim + kLanes - 1) / kLanes * kLanes; }
  int64_t head_stride() const { return 2 * static_cast<int64_t>(padded_dim()); }
  int64_t block_stride() const { return kv_heads * head_stride(); }
  uint16_t* of(int32_t block, int64_t head) const {
    return data + block * block_stride() + head * head_stride();
  }
};

// All heads of one block. By the calling thread.
void summarize_page(const PagedKv& kv, int32_t block, const PageSummaries& to);

// The pages that this step's tokens of sequences with sparse_pages have filled.
void summarize_full_pages(const Context& ctx, const AttentionPlan& plan, const PagedKv& kv,
                          const PageSummaries& to);

}  // namespace millrace::cpu
