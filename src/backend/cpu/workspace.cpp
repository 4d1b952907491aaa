#include "backend/cpu/workspace.h"

#include <algorithm>

namespace millrace::cpu {
namespace {

// Latent attention has one key for all query heads. They are taken in groups as if there were more: one of so
// many rows fills a tile, and several threads have something to do. All groups are of one size.
int32_t groups_of(int32_t heads) {
  constexpr int32_t kRows = 16;
  int32_t groups = 1;
  while (groups < heads && (heads % groups != 0 || heads / groups > kRows)) ++groups;
  return groups;
}

// The largest of any layer.
int64_t most_kv_cols(const ExecutorSpec& spec) {
  int64_t cols = int64_t{spec.kv_heads} * spec.head_dim;
  for (int g = 0; g < static_cast<int>(spec.kv_groups.size()); ++g)
    cols = std::max(cols, int64_t{spec.kv_heads_of(g)} * spec.head_dim_of(g));
  return cols;
}

AttentionShape attention_shape(const ExecutorSpec& spec) {
  const bool latent = spec.latent.rank > 0;
  bool over_ranks = false;
  for (const KvGroupSpec& group : spec.kv_groups) over_ranks |= group.shelves > 1;
  return {spec.heads,
          latent ? groups_of(spec.heads) : spec.kv_heads,
          spec.head_dim,
          spec.max_tokens,
          spec.max_context,
          latent,
          over_ranks,
          spec.page_summaries,
          spec.latent.index_top < spec.max_context ? spec.latent.index_top : 0};
}

}  // namespace

Workspace::Workspace(const ExecutorSpec& spec, int64_t all_attended_cols, int threads, bool with_bf16_tiles,
                     Arena& arena)
    : query_cols(static_cast<int64_t>(spec.heads) * spec.head_dim),
      attended_cols(all_attended_cols),
      kv_cols(most_kv_cols(spec)),
      residual(arena.take<float>(int64_t{spec.max_tokens} * spec.hidden)),
      attention_plan(attention_shape(spec), threads, arena) {
  for (int g = 0; g < static_cast<int>(spec.kv_groups.size()); ++g) {
    const KvGroupSpec& group = spec.kv_groups[static_cast<size_t>(g)];
    if (group.state || (spec.kv_heads_of(g) == spec.kv_heads && spec.head_dim_of(g) == spec.head_dim))
      continue;
    AttentionShape shape = attention_shape(spec);
    shape.kv_heads = spec.kv_heads_of(g);
    shape.head_dim = spec.head_dim_of(g);
    group_plans[static_cast<size_t>(g)].emplace(shape, threads, arena);
  }
  if (spec.page_summaries) sparse_plan.emplace(attention_shape(spec), threads, arena);
  const AttentionShape shape = attention_shape(spec);
  if (shape.index_top > 0) {
    const IndexShape index{spec.latent.index_heads, spec.latent.index_dim, shape.index_top};
    indexed_plan.emplace(shape, index, spec.kv_type, threads, arena);
  }
  const int64_t tokens = spec.max_tokens, chosen_rows = tokens * spec.experts_per_token;
  const int64_t normed_rows = std::max(tokens, int64_t{spec.max_logit_rows});
  normed = arena.take<float>(normed_rows * spec.hidden);
  query = arena.take<float>(tokens * query_cols);
  attention = arena.take<float>(tokens * std::max(query_cols, spec.state.values()));
  attended = attended_cols == query_cols ? attention : arena.take<float>(tokens * attended_cols);
  key = arena.take<float>(tokens * kv_cols);
  const LatentShape& latent = spec.latent;
  const int64_t heads = spec.heads, head_cols = std::max(latent.nope + latent.rope, latent.value);
  const int64_t compressed_cols = std::max(latent.q_rank, latent.rank + latent.rope);
  value = arena.take<float>(latent.rank > 0 ? 0 : tokens * kv_cols);
  if (latent.rank > 0) {
    head_rows = arena.take<float>(tokens * heads * head_cols);
    compressed = arena.take<float>(tokens * compressed_cols);
    head_quantized = take_quantized(arena, gemm_heads_rows(heads, tokens), std::max(latent.nope, latent.rank),
                                    with_bf16_tiles);
    index_query = arena.take<float>(tokens * latent.index_heads * latent.index_dim);
    index_key = arena.take<float>(tokens * latent.index_dim);
    index_weight = arena.take<float>(tokens * latent.index_heads);
    // pow2_blocks: of every head as many rows as are taken as blocks.
    if (with_bf16_tiles) {
      const int64_t small = std::min(tokens, kMaxRowsAsBlocks);
      head_quantized.pow2_blocks =
          arena.take<ActivationBlock>(heads * small * std::max(latent.nope, latent.rank) / kQuantBlock);
    }
  }
  logits = arena.take<float>(int64_t{spec.max_logit_rows} * spec.vocab);

  // Int8 tiles take the memory of blocks, in whole groups of rows.
  const auto whole = [](int64_t rows) { return tasks_for(rows, kTileHeight) * kTileHeight; };
  // The queries of an int8 cache are in here too; a latent cache is none.
  const int64_t input_cols = latent.rank > 0 ? std::max({int64_t{spec.hidden}, heads * latent.value,
                                                         int64_t{latent.q_rank}, spec.state.values()})
                                             : std::max({int64_t{spec.hidden}, query_cols, attended_cols,
                                                         spec.state.values(), int64_t{spec.layer_input}});
  input.blocks = arena.take<ActivationBlock>(whole(normed_rows) * (input_cols / kQuantBlock));
  const int64_t inner_size = std::max(tokens * spec.ffn, chosen_rows * spec.expert_ffn);
  const int64_t inner_blocks = std::max(whole(tokens) * spec.ffn, chosen_rows * spec.expert_ffn);
  inner = arena.take<float>(inner_size);
  inner_quantized.blocks = arena.take<ActivationBlock>(inner_blocks / kQuantBlock);
  if (with_bf16_tiles) {
    const int64_t inner_cols = std::max<int64_t>(spec.ffn, int64_t{spec.experts_per_token} * spec.expert_ffn);
    const int64_t input_size = std::max(normed_rows * input_cols, chosen_rows * spec.hidden);
    input.pow2_blocks = arena.take<ActivationBlock>(kMaxRowsAsBlocks * input_cols / kQuantBlock);
    inner_quantized.pow2_blocks = arena.take<ActivationBlock>(kMaxRowsAsBlocks * inner_cols / kQuantBlock);
    input.bf16_tiles = arena.take<uint16_t>(input_size + kTileSlackBytes);
    inner_quantized.bf16_tiles = arena.take<uint16_t>(inner_size + kTileSlackBytes);
  }
  cosines = arena.take<float>(tokens * (spec.head_dim / 2));
  sines = arena.take<float>(tokens * (spec.head_dim / 2));
  query_scale = arena.take<float>(tokens);
  sequences = arena.take<AttentionSequence>(tokens);
  for (size_t g = 0; g < kMaxKvGroups; ++g) {
    tables[g] = g < spec.kv_groups.size() ? arena.take<const int32_t*>(tokens) : nullptr;
  }

  router_scores = arena.take<float>(tokens * spec.experts);
  chosen = arena.take<int32_t>(chosen_rows);
  chosen_weight = arena.take<float>(chosen_rows);
  expert_order = take_expert_order(arena, spec.experts, tokens, spec.experts_per_token);
  expert_out = arena.take<float>(chosen_rows * spec.hidden);
  row_scale = arena.take<float>(chosen_rows);
  expert_sum = arena.take<float>(spec.expert_norms ? tokens * spec.hidden : 0);
  expert_total = arena.take<float>(spec.expert_norms ? tokens * spec.hidden : 0);
  layer_input_cols = std::ssize(spec.layers) * spec.layer_input;
  layer_inputs = arena.take<float>(tokens * layer_input_cols);
  layer_products = arena.take<float>(tokens * layer_input_cols);

  projected = arena.take<float>(tokens * std::max<int64_t>(spec.state.wkv7 ? 0 : spec.state.projected,
                                                           spec.gated_attention ? 2 * query_cols : 0));
  mix = arena.take<float>(spec.state.present() && !spec.state.wkv7 ? tokens * spec.state.mix_cols() : 0);
  attention_gate = arena.take<float>(spec.gated_attention ? tokens * query_cols : 0);
  state = StateWorkspace(spec.state, tokens, threads, arena);
  time_mix = TimeMixWorkspace(spec.state, tokens, threads, arena);
  const int64_t adapted_rows = std::max(normed_rows, chosen_rows);
  for (float*& product : low_rank) product = arena.take<float>(adapted_rows * spec.adapter_rank);

  argmax = arena.take<ArgmaxPiece>(argmax_pieces(spec.max_logit_rows, spec.vocab));
  const int64_t max_cols = std::max({input_cols, query_cols, attended_cols, int64_t{spec.ffn},
                                     int64_t{spec.expert_ffn}, int64_t{latent.nope}});
  scratch = take_gemm_scratch(arena, threads, max_cols);
}

size_t workspace_bytes(const ExecutorSpec& spec, int64_t attended_cols, int threads, bool with_bf16_tiles) {
  Arena count(nullptr);
  const Workspace layout(spec, attended_cols, threads, with_bf16_tiles, count);
  return count.used();
}

}  // namespace millrace::cpu
