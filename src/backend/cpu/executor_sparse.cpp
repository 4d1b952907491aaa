// The cpu executor's attention: all of a context, or the pages that matter (kernels/cpu/attention/
// sparse_attention.h), and the bounds of pages beside the KV pools.
#include "backend/cpu/cpu_executor.h"
#include "backend/cpu/weight.h"
#include "base/check.h"
#include "kernels/cpu/attention/paged_attention.h"
#include "kernels/cpu/attention/sparse_attention.h"

namespace millrace::cpu {

PageSummaries CpuExecutor::summaries_at(ExecutorSpec::LayerPlace place) const {
  PageSummaries summaries;
  summaries.kv_heads = spec_.kv_heads;
  summaries.head_dim = spec_.head_dim;
  const int64_t of_layer =
      spec_.kv_groups[static_cast<size_t>(place.group)].num_blocks * summaries.block_stride();
  auto* all = reinterpret_cast<uint16_t*>(summaries_[static_cast<size_t>(place.group)].data());
  summaries.data = all + place.index * of_layer;
  return summaries;
}

// Of every layer, from bytes that came from elsewhere. What is behind the last token of a block that is not
// full makes bounds of nothing; they are made again when it is.
void CpuExecutor::summarize_block(int group, int32_t block) {
  if (!has_summaries(group)) return;
  for (int32_t i = 0; i < spec_.kv_groups[static_cast<size_t>(group)].num_layers; ++i)
    summarize_page(kv_at({group, i}), block, summaries_at({group, i}));
}

PagedAttention CpuExecutor::attention_of(const Attend& op) const {
  return {work_->query,
          work_->input.blocks,
          work_->attention,
          kv_of(op.layer),
          {op.window, op.chunk, op.bidirectional},
          op.scale,
          values_of(op.sinks),
          op.softcap};
}

void CpuExecutor::attend_pages(const Attend& op) {
  const ExecutorSpec::LayerPlace place = spec_.layers[static_cast<size_t>(op.layer)];
  const AttentionPlan& plan = work_->plan_of(place.group);
  const PagedAttention attention = attention_of(op);
  const bool full = op.window == 0 && op.chunk == 0 && !op.bidirectional;
  if (!full || plan.sparse_rows().empty()) return paged_attention(context(), plan, attention);
  MILLRACE_CHECK(has_summaries(place.group));
  if (!plan.dense_tiles().empty()) paged_attention(context(), plan, attention, plan.dense_tiles());
  sparse_attention(context(), plan, *work_->sparse_plan, attention, summaries_at(place));
}

}  // namespace millrace::cpu
