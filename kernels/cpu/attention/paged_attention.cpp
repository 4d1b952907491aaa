#include "kernels/cpu/attention/paged_attention.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/attention/combine_splits.h"
#include "kernels/cpu/matmul/row_partition.h"

namespace millrace::cpu {
namespace {

// One split of a tile's context, for `heads` KV heads from kv_head on.
struct SplitTask {
  const QueryTile* tile;
  int kv_head;
  int64_t split;
  int heads = 1;
};

// One layer's attention.
class AttentionRun {
 public:
  AttentionRun(const Context& ctx, const AttentionPlan& plan, const PagedAttention& op)
      : AttentionRun(ctx, plan, op, plan.sequences()) {}
  // Of other sequences than the plan's, whose tiles are not asked for.
  AttentionRun(const Context& ctx, const AttentionPlan& plan, const PagedAttention& op,
               std::span<const AttentionSequence> sequences)
      : ctx_(ctx),
        plan_(plan),
        op_(op),
        sequences_(sequences),
        kernel_(static_cast<int>(kv_kernel_type(op.kv.type))),
        kv_heads_(plan.shape().kv_heads),
        head_dim_(plan.shape().head_dim),
        group_size_(plan.group_size()) {}

  void run(std::span<const QueryTile> tiles);
  void run_over_ranks(std::span<const QueryTile> tiles, const SplitExchange& ranks);
  void attend(const SplitSums& sums, std::span<const PlacedSplit> splits) const;
  void combine(const SplitSums& sums, const CombineSplits& how) const;

 private:
  struct Extent {
    int64_t splits = 0;  // most that a tile has
    int32_t rows = 0;
  };
  Extent extent_of(std::span<const QueryTile> tiles) const;
  int32_t rows_of(const QueryTile& tile) const { return tile.num_tokens * group_size_; }
  const AttentionSequence& sequence_of(const QueryTile& tile) const {
    return sequences_[static_cast<size_t>(tile.sequence)];
  }
  const int32_t* table_of(const QueryTile& tile, int kv_head) const {
    return op_.kv.tables[op_.kv.head_tables ? tile.sequence * kv_heads_ + kv_head : tile.sequence];
  }
  void visible(const QueryTile& tile, int64_t split, int32_t* first, int32_t* last) const;
  void first_blocks(const SplitTask& task, int from_head, const uint8_t** blocks) const;
  void attend_split(const SplitTask& task, const SplitTask* next, bool prefetched, const PartialSoftmax& out,
                    int64_t head_rows, int thread) const;
  void store_row(const QueryTile& tile, int32_t row, int kv_head, const PartialSoftmax& total) const;
  void attend_tile(const QueryTile& tile, int kv_head, int thread) const;
  void attend_in_splits(std::span<const QueryTile> tiles, const Extent& most,
                        const SplitExchange* ranks) const;
  void exchange_parts(std::span<const QueryTile> tiles, int64_t max_splits, const SplitExchange& ranks) const;
  PartialSoftmax partial_at(int64_t task, int64_t split, int64_t max_splits) const;
  PartialSoftmax rows_from(const PartialSoftmax& all, int64_t row) const {
    return {all.row_max + row, all.row_sum + row, all.out + row * plan_.padded_dim()};
  }

  const Context& ctx_;
  const AttentionPlan& plan_;
  const PagedAttention& op_;
  const std::span<const AttentionSequence> sequences_;
  const int kernel_;
  const int64_t kv_heads_, head_dim_;
  const int32_t group_size_;
};

// Positions [first, last) of the split that each row of the tile sees.
void AttentionRun::visible(const QueryTile& tile, int64_t split, int32_t* first, int32_t* last) const {
  const auto begin = static_cast<int32_t>(split * kSplitTokens);
  const int32_t length = sequence_of(tile).context_len + sequence_of(tile).num_tokens;
  for (int32_t i = 0; i < tile.num_tokens; ++i) {
    const int32_t position = sequence_of(tile).context_len + tile.first_token + i;
    const int32_t from = op_.mask.first(position);
    const int32_t to = sequence_of(tile).both_ways ? length : op_.mask.last(position, length);
    for (int32_t g = 0; g < group_size_; ++g) {
      first[i * group_size_ + g] = std::max(from, begin);
      last[i * group_size_ + g] = std::min(to, begin + kSplitTokens);
    }
  }
}

// The blocks of the first two tiles of keys of a split, as seen with the offsets of `from_head`.
void AttentionRun::first_blocks(const SplitTask& task, int from_head, const uint8_t** blocks) const {
  const int32_t position = sequence_of(*task.tile).context_len + task.tile->first_token;
  const int32_t begin = std::max(static_cast<int32_t>(task.split * kSplitTokens), op_.mask.first(position));
  const int32_t first = begin / kTileTokens * (kTileTokens / kBlockTokens);
  for (int32_t b = 0; b < 2 * kTileTokens / kBlockTokens; ++b) {
    if ((first + b) * kBlockTokens > position || (first + b + 1) * kBlockTokens <= begin) continue;
    blocks[b] = op_.kv.pool + table_of(*task.tile, task.kv_head)[first + b] * op_.kv.block_bytes +
                op_.kv.head_offset(task.kv_head - from_head);
  }
}

// next: what this thread attends to next, if anything; prefetched: the first tile, by the split before. out:
// of the first head; head_rows: rows from one head's to the next's.
void AttentionRun::attend_split(const SplitTask& task, const SplitTask* next, bool prefetched,
                                const PartialSoftmax& out, int64_t head_rows, int thread) const {
  const auto& [tile_at, kv_head, split, heads] = task;
  const QueryTile& tile = *tile_at;
  const AttentionScratch& scratch = plan_.scratch(thread);
  const int64_t query_cols = kv_heads_ * group_size_ * head_dim_;
  visible(tile, split, scratch.first, scratch.last);
  const float** query = scratch.query;
  const ActivationBlock** blocks = scratch.query_blocks;
  for (int h = kv_head; h < kv_head + heads; ++h) {
    for (int32_t i = 0; i < tile.num_tokens; ++i) {
      const int64_t row = (sequence_of(tile).first_row + tile.first_token + i) * query_cols;
      for (int32_t g = 0; g < group_size_; ++g) {
        const int64_t at = row + (static_cast<int64_t>(h) * group_size_ + g) * head_dim_;
        *query++ = op_.query + at;
        *blocks++ = op_.query_blocks == nullptr ? nullptr : op_.query_blocks + at / kQuantBlock;
      }
    }
  }
  AttentionSplit args;
  args.pool = op_.kv.pool;
  args.block_bytes = op_.kv.block_bytes;
  args.table = table_of(tile, kv_head);
  args.key_offset = op_.kv.key_offset + op_.kv.head_offset(kv_head);
  args.value_offset = op_.kv.value_offset + op_.kv.head_offset(kv_head);
  args.head_bytes = op_.kv.head_bytes;
  args.head_dim = static_cast<int32_t>(head_dim_);
  args.padded_dim = static_cast<int32_t>(plan_.padded_dim());
  args.rows = rows_of(tile);
  args.query = scratch.query;
  args.query_blocks = scratch.query_blocks;
  args.first = scratch.first;
  args.last = scratch.last;
  args.scale = op_.scale;
  args.softcap = op_.softcap;
  args.row_max = out.row_max;
  args.row_sum = out.row_sum;
  args.acc = out.out;
  args.scores = scratch.scores;
  args.shared_values = scratch.shared_values;
  args.prefetched = prefetched;
  args.heads = heads;
  args.head_rows = head_rows;
  if (next != nullptr) first_blocks(*next, kv_head, args.next_blocks);
  ctx_.kernels.attention[kernel_](args);
}

// The sink joins the denominator; the row goes to the output.
void AttentionRun::store_row(const QueryTile& tile, int32_t row, int kv_head,
                             const PartialSoftmax& total) const {
  const int32_t token = tile.first_token + row / group_size_;
  const int64_t head = static_cast<int64_t>(kv_head) * group_size_ + row % group_size_;
  float factor = 1.0f / total.row_sum[row];
  if (op_.sinks != nullptr) {
    const float sink = op_.sinks[head], row_max = std::max(total.row_max[row], sink);
    float weight[2] = {total.row_max[row] - row_max, sink - row_max};
    ctx_.kernels.exp(weight, 2, weight);
    factor = weight[0] / (total.row_sum[row] * weight[0] + weight[1]);
  }
  const int64_t out_row = sequence_of(tile).first_row + token;
  float* out = op_.out + (out_row * kv_heads_ * group_size_ + head) * head_dim_;
  const float* values = total.out + row * plan_.padded_dim();
  for (int64_t d = 0; d < head_dim_; ++d) out[d] = values[d] * factor;
}

// One tile and KV head, all splits by one thread.
void AttentionRun::attend_tile(const QueryTile& tile, int kv_head, int thread) const {
  const AttentionScratch& mine = plan_.scratch(thread);
  const auto [first, last] = plan_.splits_of(tile, op_.mask);
  for (int64_t split = first; split < last; ++split) {
    const SplitTask next{&tile, kv_head, split + 1};
    attend_split({&tile, kv_head, split}, split + 1 < last ? &next : nullptr, split > first, mine.part, 0,
                 thread);
    combine_split(ctx_.kernels, rows_of(tile), plan_.padded_dim(), mine.part, mine.total, mine.first,
                  mine.last, split == first);
  }
  for (int32_t row = 0; row < rows_of(tile); ++row) store_row(tile, row, kv_head, mine.total);
}

// The partial softmax of a split of a task, (tile, KV head).
PartialSoftmax AttentionRun::partial_at(int64_t task, int64_t split, int64_t max_splits) const {
  const int64_t at = (task * max_splits + split) * plan_.tile_rows();
  const PartialSoftmax& all = plan_.split_partials();
  return {all.row_max + at, all.row_sum + at, all.out + at * plan_.padded_dim()};
}

void AttentionRun::exchange_parts(std::span<const QueryTile> tiles, int64_t max_splits,
                                  const SplitExchange& ranks) const {
  std::vector<SplitPart> parts;
  for (int64_t t = 0; t < std::ssize(tiles); ++t) {
    const QueryTile& tile = tiles[static_cast<size_t>(t)];
    const auto [first, last] = plan_.splits_of(tile, op_.mask);
    for (int64_t split = first; split < last; ++split) {
      for (int64_t head = 0; head < kv_heads_; ++head) {
        parts.push_back({split, rows_of(tile), partial_at(t * kv_heads_ + head, split - first, max_splits)});
      }
    }
  }
  ranks.exchange(parts);
}

// Splits by different threads, some heads of a split at a time; then their combination. ranks: absent where
// all splits are here.
void AttentionRun::attend_in_splits(std::span<const QueryTile> tiles, const Extent& most,
                                    const SplitExchange* ranks) const {
  const int64_t max_splits = most.splits;
  const int32_t max_rows = most.rows;
  const int64_t together = op_.kv.one_head || op_.kv.head_tables
                               ? 1
                               : std::min<int64_t>(kv_heads_, ctx_.kernels.heads_per_split[kernel_]);
  const int64_t head_groups = tasks_for(kv_heads_, together);
  const auto split_task = [&](int64_t index) -> SplitTask {  // no tile: nothing to do
    const int64_t group = index / max_splits, head = group % head_groups * together;
    const QueryTile& tile = tiles[group / head_groups];
    const auto [first, last] = plan_.splits_of(tile, op_.mask);
    const int64_t split = first + index % max_splits;
    const bool here = split < last && (ranks == nullptr || ranks->is_here(split));
    return {here ? &tile : nullptr, static_cast<int>(head), split,
            static_cast<int>(std::min(together, kv_heads_ - head))};
  };
  const int64_t parts = std::ssize(tiles) * head_groups * max_splits;
  ctx_.pool.parallel_parts(parts, [&](const LoopPart& part, int thread) {
    const SplitTask task = split_task(part.index), next = split_task(std::max<int64_t>(0, part.next));
    if (task.tile == nullptr) return;
    const int64_t tile = part.index / max_splits / head_groups;
    attend_split(task, part.next < 0 || next.tile == nullptr ? nullptr : &next, part.prefetched,
                 partial_at(tile * kv_heads_ + task.kv_head, part.index % max_splits, max_splits),
                 max_splits * plan_.tile_rows(), thread);
  });
  if (ranks != nullptr) exchange_parts(tiles, max_splits, *ranks);
  // A row at a time: the partials lie in other threads' caches.
  const int64_t tasks = std::ssize(tiles) * kv_heads_;
  ctx_.pool.parallel_for(tasks * max_rows, 2, [&](int64_t begin, int64_t end, int thread) {
    const AttentionScratch& mine = plan_.scratch(thread);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t task = i / max_rows;
      const QueryTile& tile = tiles[task / kv_heads_];
      const auto row = static_cast<int32_t>(i % max_rows);
      if (row >= rows_of(tile)) continue;
      const QueryTile token{tile.sequence, tile.first_token + row / group_size_, 1};
      const int64_t first = plan_.splits_of(tile, op_.mask).first;
      const auto [from, to] = plan_.splits_of(token, op_.mask);
      combine_row(ctx_.kernels, row, plan_.padded_dim(), partial_at(task, from - first, max_splits),
                  to - from, plan_.tile_rows(), mine.total);
      store_row(tile, row, static_cast<int>(task % kv_heads_), mine.total);
    }
  });
}

AttentionRun::Extent AttentionRun::extent_of(std::span<const QueryTile> tiles) const {
  Extent most;
  for (const QueryTile& tile : tiles) {
    const auto [first, last] = plan_.splits_of(tile, op_.mask);
    most.splits = std::max(most.splits, last - first);
    most.rows = std::max(most.rows, rows_of(tile));
  }
  return most;
}

// As many tiles at a time as there is room for the partial softmaxes of: the same on every rank.
void AttentionRun::run_over_ranks(std::span<const QueryTile> tiles, const SplitExchange& ranks) {
  const Extent most = extent_of(tiles);
  const int64_t at_once =
      std::max<int64_t>(1, plan_.max_partials() / std::max<int64_t>(1, kv_heads_ * most.splits));
  for (int64_t done = 0; done < std::ssize(tiles); done += at_once) {
    const auto count = static_cast<size_t>(std::min(at_once, std::ssize(tiles) - done));
    attend_in_splits(tiles.subspan(static_cast<size_t>(done), count), most, &ranks);
  }
}

void AttentionRun::attend(const SplitSums& sums, std::span<const PlacedSplit> splits) const {
  const int64_t of_tile = std::ssize(splits) * kv_heads_;
  ctx_.pool.parallel_for(std::ssize(sums.tiles) * of_tile, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) {
      const PlacedTile& placed = sums.tiles[static_cast<size_t>(task / of_tile)];
      const PlacedSplit& split = splits[static_cast<size_t>(task % of_tile / kv_heads_)];
      const int64_t head = task % kv_heads_;
      const AttentionScratch& mine = plan_.scratch(thread);
      visible(placed.tile, split.split, mine.first, mine.last);
      bool any = false;
      for (int32_t row = 0; row < rows_of(placed.tile); ++row) any |= mine.first[row] < mine.last[row];
      if (!any) continue;
      const int64_t at = (split.at * kv_heads_ + head) * sums.head_rows + placed.row;
      attend_split({&placed.tile, static_cast<int>(head), split.split}, nullptr, false,
                   rows_from(sums.parts, at), 0, thread);
    }
  });
}

void AttentionRun::combine(const SplitSums& sums, const CombineSplits& how) const {
  const int64_t tasks = std::ssize(sums.tiles) * kv_heads_;
  ctx_.pool.parallel_for(tasks, 1, [&](int64_t begin, int64_t end, int thread) {
    const AttentionScratch& mine = plan_.scratch(thread);
    for (int64_t task = begin; task < end; ++task) {
      const PlacedTile& placed = sums.tiles[static_cast<size_t>(task / kv_heads_)];
      const int64_t head = task % kv_heads_;
      const PartialSoftmax total = rows_from(how.totals, head * sums.head_rows + placed.row);
      for (int64_t split = how.first; split < how.last; ++split) {
        visible(placed.tile, split, mine.first, mine.last);
        const int64_t at = ((split - how.first) * kv_heads_ + head) * sums.head_rows + placed.row;
        combine_split(ctx_.kernels, rows_of(placed.tile), plan_.padded_dim(), rows_from(sums.parts, at),
                      total, mine.first, mine.last, how.fresh && split == how.first);
      }
      if (!how.finish) continue;
      for (int32_t row = 0; row < rows_of(placed.tile); ++row) {
        store_row(placed.tile, row, static_cast<int>(head), total);
      }
    }
  });
}

void AttentionRun::run(std::span<const QueryTile> tiles) {
  const Extent most = extent_of(tiles);
  if (std::ssize(tiles) <= plan_.max_split_tiles() && most.splits >= 2 && ctx_.pool.size() > 1) {
    // As many tiles at a time as there is room for the partial softmaxes of.
    const int64_t at_once = std::max<int64_t>(1, plan_.max_partials() / (kv_heads_ * most.splits));
    for (int64_t done = 0; done < std::ssize(tiles); done += at_once) {
      const auto count = static_cast<size_t>(std::min(at_once, std::ssize(tiles) - done));
      attend_in_splits(tiles.subspan(static_cast<size_t>(done), count), most, nullptr);
    }
    return;
  }
  ctx_.pool.parallel_for(std::ssize(tiles) * kv_heads_, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) {
      attend_tile(tiles[task / kv_heads_], static_cast<int>(task % kv_heads_), thread);
    }
  });
}

}  // namespace

void paged_attention(const Context& ctx, const AttentionPlan& plan, const PagedAttention& op,
                     std::span<const QueryTile> tiles) {
  AttentionRun(ctx, plan, op).run(tiles);
}

void paged_attention(const Context& ctx, const AttentionPlan& plan, const PagedAttention& op) {
  paged_attention(ctx, plan, op, plan.tiles());
}

void paged_attention_over_ranks(const Context& ctx, const AttentionPlan& plan, const PagedAttention& op,
                                std::span<const QueryTile> tiles, const SplitExchange& ranks) {
  AttentionRun(ctx, plan, op).run_over_ranks(tiles, ranks);
}

void attend_splits(const Context& ctx, const AttentionPlan& plan, const PagedAttention& op,
                   const SplitSums& sums, std::span<const PlacedSplit> splits) {
  AttentionRun(ctx, plan, op, sums.sequences).attend(sums, splits);
}

void combine_splits(const Context& ctx, const AttentionPlan& plan, const PagedAttention& op,
                    const SplitSums& sums, const CombineSplits& combine) {
  AttentionRun(ctx, plan, op, sums.sequences).combine(sums, combine);
}

void quantize_queries(const Context& ctx, const AttentionPlan& plan, const float* query,
                      ActivationBlock* query_blocks) {
  const AttentionShape& shape = plan.shape();
  const int64_t cols = int64_t{shape.heads} * shape.head_dim;
  ctx.pool.parallel_for(plan.rows(), 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      ctx.kernels.quantize_int8(query + row * cols, cols, query_blocks + row * cols / kQuantBlock);
    }
  });
}

}  // namespace millrace::cpu
