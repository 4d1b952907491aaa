// The cpu executor's attention: all of a context, the pages that matter (kernels/cpu/attention/
// sparse_attention.h) with their bounds beside the KV pools, the tokens that an indexer chooses by keys of
// its own (indexed_attention.h), or parts of it on other ranks (context_part.h).
#include <algorithm>

#include "backend/cpu/cpu_executor.h"
#include "backend/cpu/weight.h"
#include "base/check.h"
#include "kernels/cpu/attention/indexed_attention.h"
#include "kernels/cpu/attention/paged_attention.h"
#include "kernels/cpu/attention/query_gates.h"
#include "kernels/cpu/attention/rope_append_kv.h"
#include "kernels/cpu/attention/rotary.h"
#include "kernels/cpu/attention/sparse_attention.h"
#include "kernels/cpu/matmul/gemm.h"
#include "kernels/quant/kv_types.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kIndexRowsPerTask = 4;

}  // namespace

// ---------------------------------------------------------------- keys and values of a step

// A block of a group lies as [layer][key, value][kv_head], of a latent cache as [layer][key, index key].
PagedKv CpuExecutor::kv_of(int layer) const { return kv_at(spec_.layers[layer]); }

PagedKv CpuExecutor::kv_at(ExecutorSpec::LayerPlace place) const {
  const auto [group, index] = place;
  PagedKv kv;
  kv.type = spec_.kv_type;
  kv.pool = kv_pools_[group].data();
  kv.num_blocks = spec_.kv_groups[group].num_blocks;
  kv.block_bytes = static_cast<int64_t>(spec_.kv_block_bytes(group));
  const int64_t heads = spec_.kv_heads_of(group);
  kv.head_bytes = kBlockTokens * static_cast<int64_t>(kv_head_bytes(spec_.kv_type, spec_.head_dim_of(group)));
  kv.key_offset = index * static_cast<int64_t>(spec_.kv_layer_bytes(group));
  kv.value_offset = kv.key_offset + (spec_.kv_parts() - 1) * heads * kv.head_bytes;
  kv.tables = work_->tables[group];
  kv.one_head = spec_.latent.rank > 0;
  kv.absent_elsewhere = over_ranks_ != nullptr;
  return kv;
}

// Cosines and sines of this step's positions; layers that share inv_freq share them.
void CpuExecutor::prepare_rotation(const Rope& op) {
  const auto half = static_cast<int64_t>(op.inv_freq.size());
  MILLRACE_CHECK(2 * half <= spec_.head_dim);  // the largest
  if (rotation_of_ == op.inv_freq.data() && rotation_magnitude_ == op.magnitude && rotation_size_ == half)
    return;
  const Rotary rotary{op.inv_freq, op.magnitude, op.interleaved};
  if (batch_.rope_positions.empty()) {
    rotary_angles(context(), rotary, work_->attention_plan.positions(), rows_, work_->cosines, work_->sines);
  } else {
    MILLRACE_CHECK(std::ssize(batch_.rope_positions) == 3 * rows_);
    rotary_angles_on_axes(context(), rotary, op.axes, batch_.rope_positions.data(), rows_, work_->cosines,
                          work_->sines);
  }
  rotation_of_ = op.inv_freq.data();
  rotation_magnitude_ = op.magnitude;
  rotation_size_ = half;
}

// By the position of each row of the step; nullptr where queries do not grow.
const float* CpuExecutor::query_scales(const QueryGrowth& growth) {
  if (growth.scale == 0.0f) return nullptr;
  query_growth(growth, work_->attention_plan.positions(), rows_, work_->query_scale);
  return work_->query_scale;
}

void CpuExecutor::rope_append_kv(const Rope& op) {
  if (part_ != nullptr && !part_->has_heads()) return;
  prepare_rotation(op);
  RopeAppendKv append;
  append.rows = rows_;
  append.heads = spec_.heads;
  const int group = spec_.layers[static_cast<size_t>(op.layer)].group;
  append.kv_heads = spec_.kv_heads_of(group);
  append.head_dim = spec_.head_dim_of(group);
  append.appends = op.appends;
  append.positions = work_->attention_plan.positions();
  append.sequence_of = work_->attention_plan.sequence_of();
  append.cosines = work_->cosines;
  append.sines = work_->sines;
  append.half = rotation_size_;
  append.interleaved = op.interleaved;
  append.query_scale = query_scales(op.growth);
  append.query = work_->query;
  append.key = work_->key;
  append.value = spec_.kv_parts() == 1 ? nullptr : work_->value;
  append.query_blocks = spec_.kv_type == DType::kQ8_0 ? work_->input.blocks : nullptr;
  append.kv = kv_of(op.layer);
  cpu::rope_append_kv(context(), append);
  if (spec_.latent.index_dim > 0) append_index_keys(op.layer);
  const ExecutorSpec::LayerPlace place = spec_.layers[static_cast<size_t>(op.layer)];
  if (work_->attention_plan.any_sparse() && has_summaries(place.group)) {
    summarize_full_pages(context(), work_->attention_plan, append.kv, summaries_at(place));
  }
  if (over_ranks_ == nullptr) return;
  over_ranks_->send_kv(pool_, place.group, append.kv, spec_.kv_heads, spec_.head_dim, work_->key,
                       work_->value);
}

// ---------------------------------------------------------------- what rows attend to

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
  cpu::append_index_keys(
      context(), work_->attention_plan,
      {index_keys_of(layer), rows_, spec_.latent.index_heads, spec_.latent.index_dim, rotation_size_,
       work_->cosines, work_->sines, work_->index_query, work_->index_key});
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
    // All rows: what is left out behind costs little here.
    if (op.gated) {
      gate_attention(context(), rows_, work_->query_cols, work_->attention_gate, work_->attention);
    }
  }
  if (leaves_out) keep_logit_rows(int64_t{spec_.heads} * spec_.head_dim_of(group));
}

}  // namespace millrace::cpu
