// The cpu executor's attention: all of a context, the pages that matter (kernels/cpu/attention/
// sparse_attention.h) with their bounds beside the KV pools, the tokens that an indexer chooses by keys of
// its own (indexed_attention.h), or parts of it on other ranks (context_part.h).
#include <algorithm>

#include "backend/cpu/cpu_executor.h"
#include "backend/cpu/weight.h"
#include "base/check.h"
#include "kernels/cpu/attention/indexed_attention.h"
#include "kernels/cpu/attention/paged_attention.h"
#include "kernels/cpu/attention/rotary.h"
#include "kernels/cpu/attention/sparse_attention.h"
#include "kernels/cpu/matmul/gemm.h"
#include "kernels/quant/kv_types.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kIndexRowsPerTask = 4;

}  // namespace

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

// ---------------------------------------------------------------- the indexer's tokens

// Behind the keys of the layer.
PagedKv CpuExecutor::index_keys_of(int layer) const {
  PagedKv kv = kv_of(layer);
  kv.key_offset += kv.head_bytes;
  kv.head_bytes = kBlockTokens * static_cast<int64_t>(kv_head_bytes(spec_.kv_type, spec_.latent.index_dim));
  return kv;
}

// Keys and the weights of heads; x: the normed rows.
void CpuExecutor::index_keys(const NormLatentQkv& op, const ActivationRows& x) {
  const int64_t dim = spec_.latent.index_dim;
  const GemmProduct products[] = {
      {linear_of(op.index_k), work_->index_key, dim},
      {linear_of(op.index_weights), work_->index_weight, spec_.latent.index_heads}};
  gemm(context(), products, x, rows_);
  norm_rows(context(),
            {weights_of(op.index_k_norm), work_->index_key, dim, work_->index_key, dim, rows_, dim},
            kIndexRowsPerTask);
}

// Rotated by the angles of the layer's own queries and keys, and the keys into the cache.
void CpuExecutor::append_index_keys(int layer) {
  const PagedKv kv = index_keys_of(layer);
  const int64_t dim = spec_.latent.index_dim, queries = spec_.latent.index_heads * dim;
  const AttentionPlan& plan = work_->attention_plan;
  pool_.parallel_for(rows_, kIndexRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const float *c = work_->cosines + row * rotation_size_, *s = work_->sines + row * rotation_size_;
      float *query = work_->index_query + row * queries, *key = work_->index_key + row * dim;
      for (int64_t at = 0; at < queries; at += dim) rotate(query + at, c, s, rotation_size_, false);
      rotate(key, c, s, rotation_size_, false);
      store_kv(kv, plan.sequence_of()[row], plan.positions()[row], 0, dim, key, nullptr);
    }
  });
}

void CpuExecutor::attend_pages(const Attend& op) {
  const ExecutorSpec::LayerPlace place = spec_.layers[static_cast<size_t>(op.layer)];
  const AttentionPlan& plan = work_->plan_of(place.group);
  const PagedAttention attention = attention_of(op);
  const bool full = op.window == 0 && op.chunk == 0 && !op.bidirectional;
  if (!full || plan.sparse_rows().empty()) return paged_attention(context(), plan, attention);
  if (!plan.dense_tiles().empty()) paged_attention(context(), plan, attention, plan.dense_tiles());
  if (work_->indexed_plan) {
    return indexed_attention(context(), plan, *work_->indexed_plan,
                             {attention, index_keys_of(op.layer), work_->index_query, work_->index_weight});
  }
  MILLRACE_CHECK(has_summaries(place.group));
  sparse_attention(context(), plan, *work_->sparse_plan, attention, summaries_at(place));
}

// Behind the keys and values of the last layer rows without logits are of no use, if nobody reads hidden
// states: 3% of a prompt of gpt-oss.
bool CpuExecutor::leaves_rows_out(int layer) const {
  return batch_.only_logits && layer + 1 == std::ssize(spec_.layers) && spec_.beside.empty() &&
         std::ssize(batch_.logit_rows) < rows_;
}

// They become the rows of the step. They ascend: none is overwritten before it is copied.
void CpuExecutor::keep_logit_rows(int64_t attended_cols) {
  const auto keep = [](float* values, int64_t cols, int64_t from, int64_t to) {
    if (from != to) std::copy_n(values + from * cols, cols, values + to * cols);
  };
  rows_ = std::ssize(batch_.logit_rows);
  for (int64_t i = 0; i < rows_; ++i) {
    keep(work_->residual, spec_.hidden, batch_.logit_rows[i], i);
    keep(work_->attention, attended_cols, batch_.logit_rows[i], i);
    if (spec_.layer_input > 0) keep(work_->layer_inputs, work_->layer_input_cols, batch_.logit_rows[i], i);
  }
  batch_.logit_rows = {kept_rows_.data(), static_cast<size_t>(rows_)};
  row_adapters_ = logit_adapters_;
}

void CpuExecutor::attend(const Attend& op) {
  const bool leaves_out = leaves_rows_out(op.layer);
  const int group = spec_.layers[static_cast<size_t>(op.layer)].group;
  AttentionPlan& plan = work_->plan_of(group);
  if (leaves_out) plan.keep_rows(batch_.logit_rows);
  if (deep_) prefetch_order_.resume(pool_);
  const bool computes = part_ == nullptr || part_->has_heads();
  if (computes) {
    if (over_ranks_ != nullptr && over_ranks_->is_spread(group)) {
      const bool last = batch_.only_logits && op.layer + 1 == std::ssize(spec_.layers);
      over_ranks_->attend(context(), work_->attention_plan, group, attention_of(op), last);
    } else {
      attend_pages(op);
    }
    if (op.gated) gate_attention();
  }
  if (leaves_out) keep_logit_rows(int64_t{spec_.heads} * spec_.head_dim_of(group));
}

}  // namespace millrace::cpu
