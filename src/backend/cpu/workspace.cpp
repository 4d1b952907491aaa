#include "backend/cpu/workspace.h"

#include <algorithm>

#include "backend/cpu/matmul.h"

namespace millrace::cpu {
namespace {

// Query rows (tokens times heads of a group) that share each load of keys and values. 32 rows of 64 scores
// and 64 values are 16 KiB: half of a first-level cache.
constexpr int32_t kTileRows = 32;

// Below this many tasks per thread attention is split over the context.
constexpr int64_t kSplitBelow = 4;

size_t size(int64_t count) { return static_cast<size_t>(count); }

Partial take_partial(Arena& arena, int64_t rows, int64_t padded_dim) {
  return {arena.take<float>(size(rows)), arena.take<float>(size(rows)),
          arena.take<float>(size(rows * padded_dim))};
}

}  // namespace

Workspace::Workspace(const ExecutorSpec& spec, int num_threads, bool with_tiles, Arena& arena) {
  const int64_t tokens = spec.max_tokens, chosen_rows = tokens * spec.experts_per_token;
  query_cols = static_cast<int64_t>(spec.heads) * spec.head_dim;
  kv_cols = static_cast<int64_t>(spec.kv_heads) * spec.head_dim;
  padded_dim = (spec.head_dim + kLanes - 1) / kLanes * kLanes;
  group_size = spec.heads / std::max(1, spec.kv_heads);
  tokens_per_tile = std::max(1, kTileRows / std::max(1, group_size));
  tile_rows = tokens_per_tile * group_size;
  max_spans = (static_cast<int64_t>(spec.max_context) + kSplitTokens - 1) / kSplitTokens;
  max_split_tiles =
      max_spans < 2 ? 0 : std::min(tokens, (kSplitBelow * num_threads - 1) / std::max(1, spec.kv_heads));

  residual = arena.take<float>(size(tokens * spec.hidden));
  normed = arena.take<float>(size(std::max(tokens, int64_t{spec.max_logit_rows}) * spec.hidden));
  query = arena.take<float>(size(tokens * query_cols));
  attention = arena.take<float>(size(tokens * query_cols));
  key = arena.take<float>(size(tokens * kv_cols));
  value = arena.take<float>(size(tokens * kv_cols));
  logits = arena.take<float>(size(int64_t{spec.max_logit_rows} * spec.vocab));
  // Cells take the same memory, in whole groups of rows.
  const auto whole = [](int64_t rows) { return (rows + kTileHeight - 1) / kTileHeight * kTileHeight; };
  blocks = arena.take<ActivationBlock>(size(whole(std::max(tokens, int64_t{spec.max_logit_rows})) *
                                            (std::max<int64_t>(spec.hidden, query_cols) / kQuantBlock)));
  const int64_t inner_size = std::max(tokens * spec.ffn, chosen_rows * spec.expert_ffn);
  const int64_t inner_blocks_size = std::max(whole(tokens) * spec.ffn, chosen_rows * spec.expert_ffn);
  inner = arena.take<float>(size(inner_size));
  inner_blocks = arena.take<ActivationBlock>(size(inner_blocks_size / kQuantBlock));
  const int64_t widest_input = std::max<int64_t>(spec.hidden, query_cols), few = kMaxRowsAsBlocks;
  const int64_t input_size =
      std::max(std::max(tokens, int64_t{spec.max_logit_rows}) * widest_input, chosen_rows * spec.hidden);
  const int64_t inner_few =
      few * std::max<int64_t>(spec.ffn, int64_t{spec.experts_per_token} * spec.expert_ffn);
  input_binary = with_tiles ? arena.take<ActivationBlock>(size(few * widest_input / kQuantBlock)) : nullptr;
  inner_binary = with_tiles ? arena.take<ActivationBlock>(size(inner_few / kQuantBlock)) : nullptr;
  input_tiles = with_tiles ? arena.take<uint16_t>(size(input_size + kTileSlackBytes)) : nullptr;
  inner_tiles = with_tiles ? arena.take<uint16_t>(size(inner_size + kTileSlackBytes)) : nullptr;
  cosines = arena.take<float>(size(tokens * (spec.head_dim / 2)));
  sines = arena.take<float>(size(tokens * (spec.head_dim / 2)));
  positions = arena.take<int32_t>(size(tokens));
  sequence_of = arena.take<int32_t>(size(tokens));
  tiles = arena.take<QueryTile>(size(tokens));
  split = take_partial(arena, max_split_tiles * spec.kv_heads * max_spans * tile_rows, padded_dim);

  router_logits = arena.take<float>(size(tokens * spec.experts));
  chosen = arena.take<int32_t>(size(chosen_rows));
  chosen_weight = arena.take<float>(size(chosen_rows));
  expert_start = arena.take<int32_t>(size(spec.experts + 1));
  active = arena.take<int32_t>(size(spec.experts));
  sorted_token = arena.take<int32_t>(size(chosen_rows));
  sorted_at = arena.take<int32_t>(size(chosen_rows));
  expert_out = arena.take<float>(size(chosen_rows * spec.hidden));

  const int64_t widest =
      std::max({int64_t{spec.hidden}, query_cols, int64_t{spec.ffn}, int64_t{spec.expert_ffn}});
  threads = arena.take<ThreadScratch>(size(num_threads));
  for (int t = 0; t < num_threads; ++t) {
    ThreadScratch own{};
    own.tile = arena.take<float>(size(2 * kMaxRowsPerPass * kMaxRowsPerTask));
    own.decoded = arena.take<float>(size(kDecodedRows * widest));
    own.scores = arena.take<float>(size(int64_t{kMaxHeads} * tile_rows * (kTileTokens + kLanes)));
    own.query = arena.take<const float*>(size(int64_t{kMaxHeads} * tile_rows));
    own.query_blocks = arena.take<const ActivationBlock*>(size(int64_t{kMaxHeads} * tile_rows));
    own.first = arena.take<int32_t>(size(tile_rows));
    own.last = arena.take<int32_t>(size(tile_rows));
    own.part = take_partial(arena, tile_rows, padded_dim);
    own.total = take_partial(arena, tile_rows, padded_dim);
    if (threads != nullptr) threads[t] = own;
  }
}

size_t workspace_bytes(const ExecutorSpec& spec, int threads, bool with_tiles) {
  Arena count(nullptr);
  const Workspace layout(spec, threads, with_tiles, count);
  return count.used();
}

}  // namespace millrace::cpu
