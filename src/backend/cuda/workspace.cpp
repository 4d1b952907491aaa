#include "backend/cuda/workspace.h"

#include <algorithm>

#include "backend/cuda/block_copies.h"
#include "kernels/cuda/attention/latent.h"
#include "kernels/cuda/attention/sparse.h"
#include "kernels/cuda/attention/split_plan.h"
#include "kernels/cuda/attention/tile_attention.h"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/moe/moe.h"
#include "kernels/cuda/sample/argmax.h"
#include "kernels/cuda/sample/sample.h"

namespace millrace::cuda {
namespace {

struct Sizes {  // bytes
  Sizes(const ExecutorSpec& spec, const Device& device, int64_t attended_cols) {
    const auto rows = static_cast<size_t>(spec.max_tokens),
               logit_rows = static_cast<size_t>(spec.max_logit_rows);
    const size_t pairs = rows * static_cast<size_t>(spec.experts_per_token);
    // Latent attention: queries before they are absorbed, and values behind it, are in these buffers in turn.
    const int32_t latent_dim = std::max(spec.latent.nope + spec.latent.rope, spec.latent.value);
    const size_t query_cols =
        static_cast<size_t>(spec.heads) * static_cast<size_t>(std::max(spec.head_dim, latent_dim));
    compressed = rows * static_cast<size_t>(spec.latent.q_rank) * 4;
    low_rank = std::max({rows, logit_rows, pairs}) * static_cast<size_t>(spec.adapter_rank) * 4;
    hidden = rows * static_cast<size_t>(spec.hidden) * 4;
    query = rows * query_cols * 4;
    const size_t value_cols = spec.state.present() ? static_cast<size_t>(spec.state.values()) : 0;
    attention = rows * std::max(query_cols, value_cols) * 4;
    if (spec.state.wkv7) {  // RWKV 7 has rows of its own
      shifted = hidden;
      projected = rows * static_cast<size_t>(spec.state.projected) * 4;
    } else if (spec.state.present()) {
      mix = rows * static_cast<size_t>(spec.state.mix_cols()) * 4;
      convolved = rows * static_cast<size_t>(spec.state.channels()) * 4;
      decays = rows * static_cast<size_t>(spec.state.steps()) * 4;
      projected = (rows * static_cast<size_t>(spec.state.projected) + kStateProducts * kProductAlignment) * 4;
    }

    if (spec.gated_attention) {
      projected = std::max(projected, 2 * query);
      attention_gate = query;
    }
    size_t kv_cols = static_cast<size_t>(spec.kv_heads) * static_cast<size_t>(spec.head_dim);
    for (int g = 0; g < static_cast<int>(spec.kv_groups.size()); ++g) {
      kv_cols = std::max(kv_cols,
                         static_cast<size_t>(spec.kv_heads_of(g)) * static_cast<size_t>(spec.head_dim_of(g)));
    }
    key = rows * kv_cols * 4;
    layer_inputs = rows * spec.layers.size() * static_cast<size_t>(spec.layer_input) * 4;
    expert_sum = spec.expert_norms ? hidden : 0;
    gate = std::max(rows * static_cast<size_t>(spec.ffn), pairs * static_cast<size_t>(spec.expert_ffn)) * 4;
    down = pairs * static_cast<size_t>(spec.hidden) * 4;
    scores = rows * static_cast<size_t>(spec.experts) * 4;
    chosen = pairs * 4;
    normed_logit_rows = logit_rows * static_cast<size_t>(spec.hidden) * 4;
    logits = logit_rows * static_cast<size_t>(spec.vocab) * 4;
    best = logit_rows * 4;
    const int64_t gemv_rows = std::min(spec.max_tokens, kMaxGemvRows);
    x_bf16 = spec.experts > 0 ? static_cast<size_t>(gemv_rows) * static_cast<size_t>(spec.hidden) * 2 : 0;
    moe_sync = spec.experts > 0 ? sizeof(PersistentMoeSync) : 0;
    const auto expert_rows =
        static_cast<int64_t>(pairs) +
        int64_t{kWgmmaRows} * std::min<int64_t>(static_cast<int64_t>(pairs), spec.experts);
    bf16_rows = std::max(
        {bf16_rows_bytes(spec.max_tokens,
                         std::max(static_cast<int64_t>(std::max(query_cols, value_cols)), attended_cols),
                         device),
         bf16_rows_bytes(spec.max_tokens,
                         std::max({spec.hidden, spec.ffn, spec.latent.q_rank, spec.layer_input,
                                   spec.state.wkv7 ? spec.state.projected : 0}),
                         device),
         bf16_rows_bytes(spec.max_logit_rows, spec.hidden, device),
         bf16_rows_bytes(expert_rows, std::max(spec.hidden, spec.expert_ffn), device)});
    split = split_workspace_bytes(device);
    act_rows = pairs > 0 ? bf16_rows_bytes(expert_rows, spec.expert_ffn, device) : 0;
    groups = pairs > 0 ? expert_groups_ints(static_cast<int64_t>(pairs), spec.experts, device) * 4 : 0;
    if (spec.latent.rank > 0) {
      const int32_t splits = max_splits_for(spec.max_context, 0);
      if (splits > 1 && supports_latent_wgmma(spec.kv_type, spec.latent.rope, spec.latent.rank, device)) {
        partial = std::min(2 * kMaxPartialBytes,  // heads share what is read: more of them for the same rows
                           latent_partial_bytes(spec.max_tokens, spec.heads, splits, spec.latent.rank));
      }
    } else {
      for (int g = 0; g < static_cast<int>(spec.kv_groups.size()); ++g) {
        if (!spec.kv_groups[static_cast<size_t>(g)].state) attention_splits_of(spec, g, device);
      }
    }
    candidates = argmax_candidates_bytes(spec.max_logit_rows);
    sample_details = logit_rows * sizeof(SampleDetails);
    per_token = rows * 4;
    sparse = static_cast<size_t>(sparse_rows_of(spec)) *
             sparse_row_bytes(spec.heads, spec.kv_heads, sparse_pages_of(spec));
    index_query =
        rows * static_cast<size_t>(spec.latent.index_heads) * static_cast<size_t>(spec.latent.index_dim) * 4;
    index_key = rows * static_cast<size_t>(spec.latent.index_dim) * 4;
    index_weights = rows * static_cast<size_t>(spec.latent.index_heads) * 4;
    indexed = static_cast<size_t>(indexed_rows_of(spec)) * indexed_row_bytes(indexed_shape_of(spec));
  }
  // What attention of a group's layers needs for splits.
  void attention_splits_of(const ExecutorSpec& spec, int group, const Device& device) {
    const int32_t kv_heads = spec.kv_heads_of(group), dim = spec.head_dim_of(group);
    if (supports_paged_attention(spec.kv_type, spec.heads, kv_heads, dim, device)) {
      partial = std::max(partial, partial_bytes_for(spec.max_tokens, spec.max_context, kv_heads, dim));
      arrived = std::max(arrived, static_cast<size_t>(spec.max_tokens) * static_cast<size_t>(kv_heads) * 4);
    } else if (supports_tile_attention(spec.kv_type, spec.heads, kv_heads, dim, device)) {
      const int32_t splits = max_splits_for(spec.max_context, 0);
      if (splits <= 1) return;
      partial = std::max(partial, std::min(kMaxPartialBytes, tile_attention_partial_bytes(
                                                                 spec.max_tokens, spec.heads, splits, dim)));
    }
  }
  size_t total() const {
    return 2 * hidden + query + attention + 2 * key + 2 * gate + down + scores + 2 * chosen +
           normed_logit_rows + logits + best + x_bf16 + moe_sync + bf16_rows + split + act_rows + groups +
           partial + arrived + candidates + sample_details + 2 * per_token + projected + mix + convolved +
           2 * decays + attention_gate + compressed + low_rank + 3 * layer_inputs + 2 * expert_sum +
           (2 + kTimeMixParts) * shifted + sparse + index_query + index_key + index_weights + indexed;
  }
  size_t hidden, query, key, gate, down, scores, chosen, normed_logit_rows, logits, best, x_bf16, moe_sync,
      bf16_rows, split, act_rows, groups, partial = 0, arrived = 0, candidates, sample_details, per_token;
  size_t layer_inputs, expert_sum, shifted = 0, sparse, index_query, index_key, index_weights, indexed;
  size_t attention, projected = 0, mix = 0, convolved = 0, decays = 0, attention_gate = 0, compressed,
                    low_rank;
};

DeviceBuffer memory(size_t bytes) { return {bytes, "the workspace"}; }
DeviceBuffer zeros(size_t bytes, cudaStream_t stream) {
  DeviceBuffer buffer = memory(bytes);
  if (bytes > 0) MILLRACE_CUDA_TRY(cudaMemsetAsync(buffer.as<void>(), 0, bytes, stream));
  return buffer;
}

}  // namespace

Workspace::Workspace(const ExecutorSpec& spec, const Launch& at, int64_t attended_cols) {
  const Sizes sizes(spec, at.device, attended_cols);
  residual = memory(sizes.hidden);
  normed = memory(sizes.hidden);
  query = memory(sizes.query);
  attention = memory(sizes.attention);
  key = memory(sizes.key);
  value = memory(sizes.key);
  gate = memory(sizes.gate);
  up = memory(sizes.gate);
  down = memory(sizes.down);
  scores = memory(sizes.scores);
  chosen = memory(sizes.chosen);
  chosen_weight = memory(sizes.chosen);
  normed_logit_rows = memory(sizes.normed_logit_rows);
  logits = memory(sizes.logits);
  best = memory(sizes.best);
  x_bf16 = memory(sizes.x_bf16);
  moe_sync = zeros(sizes.moe_sync, at.stream);
  bf16_rows = memory(sizes.bf16_rows);
  split = zeros(sizes.split, at.stream);
  act_rows = memory(sizes.act_rows);
  groups = memory(sizes.groups);
  partial = memory(sizes.partial);
  arrived = zeros(sizes.arrived, at.stream);
  candidates = zeros(sizes.candidates, at.stream);
  sample_details = zeros(sizes.sample_details, at.stream);
  token_types = zeros(sizes.per_token, at.stream);
  mix = memory(sizes.per_token);
  projected = memory(sizes.projected);
  state_mix = memory(sizes.mix);
  convolved = memory(sizes.convolved);
  decays = memory(sizes.decays);
  betas = memory(sizes.decays);
  attention_gate = memory(sizes.attention_gate);
  compressed = memory(sizes.compressed);
  low_rank = memory(sizes.low_rank);
  layer_inputs = memory(sizes.layer_inputs);
  layer_table = memory(sizes.layer_inputs);
  layer_products = memory(sizes.layer_inputs);
  shared_sum = memory(sizes.expert_sum);
  expert_sum = memory(sizes.expert_sum);
  shifted = memory(sizes.shifted);
  first_values = memory(sizes.shifted);
  time_mix = memory(kTimeMixParts * sizes.shifted);
  for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
    const auto blocks = static_cast<size_t>(spec.kv_groups[g].num_blocks);
    pools.emplace_back(spec.kv_block_bytes(static_cast<int>(g)) * blocks, "the KV cache");
    summaries.push_back(zeros(spec.page_summary_bytes(static_cast<int>(g)) * blocks, at.stream));
  }
  const auto sparse_rows = static_cast<size_t>(sparse_rows_of(spec)),
             sparse_pages = static_cast<size_t>(sparse_pages_of(spec)),
             heads = static_cast<size_t>(spec.heads), kv_heads = static_cast<size_t>(spec.kv_heads);
  sparse_weights = memory(sparse_rows * heads * sparse_pages * sizeof(float));
  sparse_tiles = memory(sparse_rows * heads * (sparse_pages / kSummaryTile) * sizeof(float2));
  sparse_chosen = memory(sparse_rows * kv_heads * sparse_pages * sizeof(int32_t));
  sparse_tables = memory(sparse_rows * kv_heads * sizeof(int32_t*));
  sparse_positions = memory(sparse_rows * sizeof(int32_t));
  index_query = memory(sizes.index_query);
  index_key = memory(sizes.index_key);
  index_weights = memory(sizes.index_weights);
  const IndexedRows indexed = indexed_shape_of(spec);
  const auto indexed_rows = static_cast<size_t>(indexed_rows_of(spec)),
             top = static_cast<size_t>(indexed.top),
             top_blocks = static_cast<size_t>(blocks_for(indexed.top));
  indexed_scores = memory(indexed_rows * static_cast<size_t>(indexed.context) * sizeof(float));
  indexed_tokens = memory(indexed_rows * top * sizeof(int32_t));
  indexed_keys =
      memory(indexed_rows * top_blocks * kBlockTokens * kv_head_bytes(spec.kv_type, spec.head_dim));
  indexed_blocks = memory(indexed_rows * top_blocks * sizeof(int32_t));
  indexed_tables = memory(indexed_rows * sizeof(int32_t*));
  indexed_positions = memory(indexed_rows * sizeof(int32_t));
}

IndexedRows indexed_shape_of(const ExecutorSpec& spec) {
  IndexedRows shape;
  shape.cache.type = spec.kv_type;
  shape.cache.head_dim = spec.head_dim;
  shape.top = spec.latent.index_top;
  shape.context = (spec.max_context + kIndexTile - 1) / kIndexTile * kIndexTile;
  return shape;
}

// As many as fit into 128 MB, 44 of DeepSeek 3.2 at 131,072 positions; one at least.
int32_t indexed_rows_of(const ExecutorSpec& spec) {
  if (spec.latent.index_top == 0) return 0;
  constexpr size_t kMostBytes = size_t{128} << 20;
  const size_t rows = kMostBytes / indexed_row_bytes(indexed_shape_of(spec));
  return static_cast<int32_t>(std::clamp<size_t>(rows, 1, static_cast<size_t>(std::max(1, spec.max_tokens))));
}

int32_t sparse_pages_of(const ExecutorSpec& spec) {
  return (blocks_for(spec.max_context) + kSummaryTile - 1) / kSummaryTile * kSummaryTile;
}

// As many as fit into 128 MB, 64 at 131,072 positions and 64 heads; one at least.
int32_t sparse_rows_of(const ExecutorSpec& spec) {
  if (!spec.page_summaries) return 0;
  constexpr size_t kMostBytes = size_t{128} << 20;
  const size_t rows = kMostBytes / sparse_row_bytes(spec.heads, spec.kv_heads, sparse_pages_of(spec));
  return static_cast<int32_t>(std::clamp<size_t>(rows, 1, static_cast<size_t>(std::max(1, spec.max_tokens))));
}

size_t workspace_bytes_of(const ExecutorSpec& spec, const Device& device, int64_t attended_cols) {
  return Sizes(spec, device, attended_cols).total() + BlockCopies::device_bytes(largest_block_of(spec));
}

size_t largest_block_of(const ExecutorSpec& spec) {
  size_t largest = 0;
  for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
    largest = std::max(largest, spec.kv_block_bytes(static_cast<int>(g)));
  }
  return largest;
}

}  // namespace millrace::cuda
