#include "backend/cpu/workspace.h"

#include <algorithm>

namespace millrace::cpu {
namespace {

AttentionShape attention_shape(const ExecutorSpec& spec) {
  return {spec.heads, spec.kv_heads, spec.head_dim, spec.max_tokens, spec.max_context};
}

}  // namespace

Workspace::Workspace(const ExecutorSpec& spec, int threads, bool with_bf16_tiles, Arena& arena)
    : query_cols(static_cast<int64_t>(spec.heads) * spec.head_dim),
      kv_cols(static_cast<int64_t>(spec.kv_heads) * spec.head_dim),
      residual(arena.take<float>(int64_t{spec.max_tokens} * spec.hidden)),
      attention_plan(attention_shape(spec), threads, arena) {
  const int64_t tokens = spec.max_tokens, chosen_rows = tokens * spec.experts_per_token;
  const int64_t normed_rows = std::max(tokens, int64_t{spec.max_logit_rows});
  normed = arena.take<float>(normed_rows * spec.hidden);
  query = arena.take<float>(tokens * query_cols);
  attention = arena.take<float>(tokens * query_cols);
  key = arena.take<float>(tokens * kv_cols);
  value = arena.take<float>(tokens * kv_cols);
  logits = arena.take<float>(int64_t{spec.max_logit_rows} * spec.vocab);

  // Int8 tiles take the memory of blocks, in whole groups of rows.
  const auto whole = [](int64_t rows) { return tasks_for(rows, kTileHeight) * kTileHeight; };
  const int64_t input_cols = std::max<int64_t>(spec.hidden, query_cols);
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

  for (float*& product : low_rank) product = arena.take<float>(normed_rows * spec.adapter_rank);

  argmax = arena.take<ArgmaxPiece>(argmax_pieces(spec.max_logit_rows, spec.vocab));
  const int64_t max_cols =
      std::max({int64_t{spec.hidden}, query_cols, int64_t{spec.ffn}, int64_t{spec.expert_ffn}});
  scratch = take_gemm_scratch(arena, threads, max_cols);
}

size_t workspace_bytes(const ExecutorSpec& spec, int threads, bool with_bf16_tiles) {
  Arena count(nullptr);
  const Workspace layout(spec, threads, with_bf16_tiles, count);
  return count.used();
}

}  // namespace millrace::cpu
