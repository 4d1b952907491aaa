#include "backend/cpu/prompt_attention.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "base/check.h"
#include "kernels/quant/kv_types.h"

namespace millrace::cpu {
namespace {

// Splits of a rank in a round, at most: few rows leave room for more, and messages are fewer.
constexpr int64_t kMostPerRound = 4;
constexpr int64_t kLineBytes = 64;  // a vector behind the last value may be loaded past it

int64_t layer_block_bytes(const ExecutorSpec& spec) {
  return int64_t{spec.kv_parts()} * spec.kv_heads * kBlockTokens *
         static_cast<int64_t>(kv_head_bytes(spec.kv_type, spec.head_dim));
}

int64_t padded(int64_t head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

dist::PromptShape shape_of(const ExecutorSpec& spec) {
  return {.query_bytes = int64_t{spec.heads} * spec.head_dim * static_cast<int64_t>(sizeof(float)),
          .block_bytes = layer_block_bytes(spec),
          .partial_bytes =
              int64_t{spec.heads} * (padded(spec.head_dim) + 2) * static_cast<int64_t>(sizeof(float))};
}

int64_t rows_of_rank(const ExecutorSpec& spec, int ranks) { return (spec.max_tokens / (2 * ranks) + 1) * 2; }

int64_t per_round(int64_t most_rows, int64_t rows) {
  return std::clamp<int64_t>(most_rows / std::max<int64_t>(1, rows), 1, kMostPerRound);
}

// body(moves) beside `compute`, and what either throws once both have ended.
template <class Compute, class Moves>
void at_once(const Compute& compute, const Moves& move) {
  std::exception_ptr fault;
  std::thread moves([&] {
    try {
      move();
    } catch (...) {
      fault = std::current_exception();
    }
  });
  try {
    compute();
  } catch (...) {
    moves.join();
    throw;
  }
  moves.join();
  if (fault != nullptr) std::rethrow_exception(fault);
}

}  // namespace

float* PromptAttention::Floats::at_least(int64_t count) {
  const auto lines = static_cast<size_t>((count + 15) / 16 + 1);
  if (lines_.size() < lines) lines_.resize(lines);
  return data();
}

PromptAttention::PromptAttention(dist::Communicator& group, const ExecutorSpec& whole,
                                 dist::ScheduleKind kind)
    : group_(group),
      kind_(kind),
      shape_(shape_of(whole)),
      most_rows_(rows_of_rank(whole, group.size())),
      owners_(static_cast<size_t>(group.size())),
      keys_(static_cast<size_t>(group.size())),
      key_bytes_(static_cast<size_t>(group.size())) {}

// Of all ranks: keys and values of a round, partial softmaxes of own rows and their totals. Where queries
// move too: those of others, their partial softmaxes, and messages of both.
size_t PromptAttention::buffer_bytes(const ExecutorSpec& whole, int ranks, dist::ScheduleKind kind) {
  const dist::PromptShape shape = shape_of(whole);
  const int64_t rows = rows_of_rank(whole, ranks);
  const int64_t keys = ranks * kMostPerRound * (kShelfBlocks * shape.block_bytes + 2 * kLineBytes);
  const int64_t own = (ranks + 1) * rows * shape.partial_bytes;
  const int64_t others = ranks * rows * (2 * shape.query_bytes + 3 * shape.partial_bytes);
  return static_cast<size_t>(keys + own + (kind == dist::ScheduleKind::kRing ? 0 : others));
}

PromptWork PromptAttention::plan(dist::PromptLayout layout) const {
  PromptWork work;
  work.layout = std::move(layout);
  work.schedule = dist::choose_schedule(kind_, work.layout, shape_);
  const auto n = static_cast<size_t>(ranks());
  work.met.assign(n, std::vector<std::set<int>>(n));
  for (const dist::ContextStep& step : work.schedule.steps) {
    for (const dist::BlockMove& move : step.moves) {
      work.moves_queries |= move.kind == dist::BlockKind::kQueries;
    }
    for (size_t rank = 0; rank < n; ++rank) {
      for (const dist::ContextTile& tile : step.tiles[rank]) {
        work.met[rank][static_cast<size_t>(tile.queries)].insert(tile.keys);
      }
    }
  }
  return work;
}

// ---------------------------------------------------------------- a round's parts

// Rows of every owner as sequences and tiles; others' are packed, this rank's are where they are.
void PromptAttention::begin(const AttentionPlan& plan, const PagedAttention& op, const PromptWork& work,
                            std::span<const int32_t> own_rows) {
  plan_ = &plan;
  kv_heads_ = plan.shape().kv_heads;
  group_size_ = plan.group_size();
  padded_dim_ = plan.padded_dim();
  query_cols_ = int64_t{plan.shape().heads} * plan.shape().head_dim;
  block_bytes_ = op.kv.value_offset - op.kv.key_offset + kv_heads_ * op.kv.head_bytes;
  MILLRACE_CHECK(block_bytes_ == shape_.block_bytes);
  table_.assign(static_cast<size_t>(work.layout.last_block), kNoBlock);
  const auto per_tile = static_cast<int32_t>(plan.tile_rows() / group_size_);
  for (int o = 0; o < ranks(); ++o) {
    Owner& owner = owners_[static_cast<size_t>(o)];
    owner.sequences.clear();
    owner.tiles.clear();
    owner.rows = 0;
    const std::vector<dist::QueryRun>& runs = work.layout.queries[static_cast<size_t>(o)];
    for (size_t i = 0; i < runs.size(); ++i) {
      const auto tokens = static_cast<int32_t>(runs[i].rows());
      const auto sequence = static_cast<int32_t>(i);
      owner.sequences.push_back({.first_row = o == me() ? own_rows[i] : static_cast<int32_t>(owner.rows),
                                 .num_tokens = tokens,
                                 .context_len = static_cast<int32_t>(runs[i].first)});
      for (int32_t t = 0; t < tokens; t += per_tile) {
        owner.tiles.push_back(
            {{sequence, t, std::min(per_tile, tokens - t)}, (owner.rows + t) * group_size_});
      }
      owner.rows += tokens;
    }
    owner.tables.assign(runs.size(), table_.data());
  }
}

void PromptAttention::pack_queries(const PagedAttention& op) {
  Owner& own = owners_[static_cast<size_t>(me())];
  const auto row_bytes = static_cast<size_t>(query_cols_) * sizeof(float);
  own.message.resize(static_cast<size_t>(own.rows) * row_bytes);
  std::byte* to = own.message.data();
  for (const AttentionSequence& run : own.sequences) {
    const size_t bytes = static_cast<size_t>(run.num_tokens) * row_bytes;
    std::memcpy(to, op.query + run.first_row * query_cols_, bytes);
    to += bytes;
  }
}

// Room for every rank's blocks of the round, with this rank's in theirs.
void PromptAttention::take_keys(const PagedAttention& op, const dist::PromptLayout& layout,
                                const Round& round, const int32_t* table) {
  const auto bytes = static_cast<size_t>(block_bytes_);
  for (int o = 0; o < ranks(); ++o) {
    const auto owner = static_cast<size_t>(o);
    key_bytes_[owner] = static_cast<size_t>(layout.blocks(o, {round.first, round.last})) * bytes;
    const size_t lines = key_bytes_[owner] / kLineBytes + 2;
    if (keys_[owner].size() < lines) keys_[owner].resize(lines);
  }
  std::vector<int32_t> next(key_bytes_.size(), 0);
  auto* const mine = reinterpret_cast<std::byte*>(keys_[static_cast<size_t>(me())].data());
  for (int64_t split = round.first; split < round.last; ++split) {
    const int owner = layout.owner_of(split);
    const dist::RowRange blocks = layout.blocks_of(split);
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
      const int32_t place = next[static_cast<size_t>(owner)]++;
      table_[static_cast<size_t>(b)] = place;
      if (owner != me()) continue;
      MILLRACE_CHECK(table[b] >= 0 && table[b] < op.kv.num_blocks);
      std::memcpy(mine + static_cast<size_t>(place) * bytes,
                  op.kv.pool + table[b] * op.kv.block_bytes + op.kv.key_offset, bytes);
    }
  }
}

// Splits of the round that `rank` computes for `owner`, in order. An owner has a place for every split, where
// its own and others' results come together.
std::vector<PlacedSplit> PromptAttention::splits_of(const PromptWork& work, const Round& round, int rank,
                                                    int owner) const {
  std::vector<PlacedSplit> splits;
  const std::set<int>& met = work.met[static_cast<size_t>(rank)][static_cast<size_t>(owner)];
  for (int64_t split = round.first; split < round.last; ++split) {
    if (!met.contains(work.layout.owner_of(split))) continue;
    splits.push_back({split, owner == me() ? split - round.first : std::ssize(splits)});
  }
  return splits;
}

void PromptAttention::make_room(const PromptWork& work, const Round& round, int owner) {
  Owner& of = owners_[static_cast<size_t>(owner)];
  const int64_t splits =
      owner == me() ? round.last - round.first : std::ssize(splits_of(work, round, me(), owner));
  const int64_t rows = splits * kv_heads_ * of.rows * group_size_;
  of.row_max.at_least(rows);
  of.row_sum.at_least(rows);
  of.out.at_least(rows * padded_dim_);
}

// ---------------------------------------------------------------- what moves

std::vector<dist::Message> PromptAttention::moves_of(const PromptWork& work, const Round& round,
                                                     const dist::ContextStep& step) {
  std::vector<dist::Message> messages;
  for (const dist::BlockMove& move : step.moves) {
    const auto owner = static_cast<size_t>(move.owner);
    dist::Message message{move.from, move.to, {}, {}, 0};
    std::byte* at = nullptr;
    if (move.kind == dist::BlockKind::kKeys) {
      message.bytes = key_bytes_[owner];
      at = reinterpret_cast<std::byte*>(keys_[owner].data());
    } else if (round.queries_move) {
      const int64_t values = work.layout.rows(move.owner) * query_cols_;
      message.bytes = static_cast<size_t>(values) * sizeof(float);
      if (move.owner == me()) {
        at = owners_[owner].message.data();
      } else if (move.from == me() || move.to == me()) {
        at = reinterpret_cast<std::byte*>(owners_[owner].queries.at_least(values));
      }
    }
    if (move.from == me()) message.out = {at, message.bytes};
    if (move.to == me()) message.in = {at, message.bytes};
    messages.push_back(message);
  }
  return messages;
}

size_t PromptAttention::partial_bytes(const PromptWork& work, const Round& round, int from, int to) const {
  int64_t rows = 0;
  for (const PlacedSplit& split : splits_of(work, round, from, to)) {
    for (const dist::QueryRun& run : work.layout.queries[static_cast<size_t>(to)]) {
      const dist::RowRange seen = work.layout.seen_by(run, split.split);
      rows += seen.end - seen.begin;
    }
  }
  return static_cast<size_t>(rows * shape_.partial_bytes);
}

// copy(values of partial softmaxes, their bytes in the message, bytes): of rows that see a split, maxima,
// sums and values by KV head.
template <class Copy>
void PromptAttention::visit_partials(const PromptWork& work, int owner, std::span<const PlacedSplit> splits,
                                     std::span<std::byte> message, const Copy& copy) {
  Owner& of = owners_[static_cast<size_t>(owner)];
  const PartialSoftmax parts = parts_of(of);
  std::byte* at = message.data();
  const auto one = [&](float* values, int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(float);
    copy(values, at, bytes);
    at += bytes;
  };
  for (const PlacedSplit& split : splits) {
    int64_t before = 0;  // rows of runs
    for (const dist::QueryRun& run : work.layout.queries[static_cast<size_t>(owner)]) {
      const dist::RowRange seen = work.layout.seen_by(run, split.split);
      const int64_t rows = (seen.end - seen.begin) * group_size_;
      for (int64_t head = 0; head < kv_heads_ && rows > 0; ++head) {
        const int64_t row = ((split.at * kv_heads_ + head) * of.rows + before + seen.begin) * group_size_;
        one(parts.row_max + row, rows);
        one(parts.row_sum + row, rows);
        one(parts.out + row * padded_dim_, rows * padded_dim_);
      }
      before += run.rows();
    }
  }
  MILLRACE_CHECK(at == message.data() + message.size());
}

// What was computed for others goes to them, and comes to its place among this rank's own.
void PromptAttention::send_partials_home(const PromptWork& work, const Round& round) {
  std::vector<dist::Message> messages;
  std::vector<std::vector<std::byte>> arriving(static_cast<size_t>(ranks()));
  for (int hop = 1; hop < ranks(); ++hop) {
    for (int from = 0; from < ranks(); ++from) {
      const int to = (from + hop) % ranks();
      const size_t bytes = partial_bytes(work, round, from, to);
      if (bytes == 0) continue;
      dist::Message message{from, to, {}, {}, bytes};
      if (from == me()) {
        std::vector<std::byte>& packed = owners_[static_cast<size_t>(to)].message;
        packed.resize(bytes);
        visit_partials(
            work, to, splits_of(work, round, from, to), packed,
            [](const float* values, std::byte* at, size_t count) { std::memcpy(at, values, count); });
        message.out = packed;
      } else if (to == me()) {
        arriving[static_cast<size_t>(from)].resize(bytes);
        message.in = arriving[static_cast<size_t>(from)];
      }
      messages.push_back(message);
    }
  }
  dist::exchange_messages(group_, messages);
  for (int from = 0; from < ranks(); ++from) {
    std::vector<std::byte>& bytes = arriving[static_cast<size_t>(from)];
    if (bytes.empty()) continue;
    visit_partials(work, me(), splits_of(work, round, from, me()), bytes,
                   [](float* values, const std::byte* at, size_t count) { std::memcpy(values, at, count); });
  }
}

// ---------------------------------------------------------------- what is computed

// Queries of one owner against the round's keys of one.
void PromptAttention::compute(const Context& ctx, const PagedAttention& op, const PromptWork& work,
                              const Round& round, const dist::ContextTile& tile) {
  Owner& owner = owners_[static_cast<size_t>(tile.queries)];
  std::vector<PlacedSplit> splits = splits_of(work, round, me(), tile.queries);
  std::erase_if(splits,
                [&](const PlacedSplit& split) { return work.layout.owner_of(split.split) != tile.keys; });
  if (owner.tiles.empty() || splits.empty()) return;
  PagedAttention part = op;
  if (tile.queries != me()) {
    part.query = owner.queries.data();
    part.query_blocks = op.query_blocks == nullptr ? nullptr : owner.blocks.data();
    part.out = nullptr;
  }
  part.kv.pool = reinterpret_cast<uint8_t*>(keys_[static_cast<size_t>(tile.keys)].data());
  part.kv.num_blocks =
      static_cast<int32_t>(key_bytes_[static_cast<size_t>(tile.keys)] / static_cast<size_t>(block_bytes_));
  part.kv.block_bytes = block_bytes_;
  part.kv.value_offset = op.kv.value_offset - op.kv.key_offset;
  part.kv.key_offset = 0;
  part.kv.tables = owner.tables.data();
  attend_splits(ctx, *plan_, part, {owner.sequences, owner.tiles, owner.rows * group_size_, parts_of(owner)},
                splits);
}

void PromptAttention::attend(const Context& ctx, const AttentionPlan& plan, const PagedAttention& op,
                             const PromptWork& work, const int32_t* table,
                             std::span<const int32_t> own_rows) {
  const dist::PromptLayout& layout = work.layout;
  begin(plan, op, work, own_rows);
  Owner& own = owners_[static_cast<size_t>(me())];
  const int64_t total_rows = kv_heads_ * own.rows * group_size_;
  const PartialSoftmax totals{total_max_.at_least(total_rows), total_sum_.at_least(total_rows),
                              total_out_.at_least(total_rows * padded_dim_)};
  const int64_t splits = per_round(most_rows_, layout.most_rows()) * ranks();
  const int64_t start = layout.first_split(), end = layout.last_split();
  for (int64_t at = start / splits * splits; at < end; at += splits) {
    const Round round{std::max(at, start), std::min(at + splits, end), work.moves_queries && at <= start};
    if (round.queries_move) pack_queries(op);
    take_keys(op, layout, round, table);
    for (int o = 0; o < ranks(); ++o) make_room(work, round, o);
    for (const dist::ContextStep& step : work.schedule.steps) {
      const std::vector<dist::Message> moves = moves_of(work, round, step);
      const auto tiles = [&] {
        for (const dist::ContextTile& tile : step.tiles[static_cast<size_t>(me())]) {
          compute(ctx, op, work, round, tile);
        }
      };
      const bool moves_here = std::any_of(moves.begin(), moves.end(), [&](const dist::Message& m) {
        return m.bytes > 0 && (m.from == me() || m.to == me());
      });
      if (moves_here) {
        at_once(tiles, [&] { dist::exchange_messages(group_, moves); });
      } else {
        tiles();
      }
      if (round.queries_move && op.query_blocks != nullptr) quantize_arrived(ctx, step);
    }
    send_partials_home(work, round);
    combine_splits(ctx, plan, op, {own.sequences, own.tiles, own.rows * group_size_, parts_of(own)},
                   {round.first, round.last, totals, round.first == start, round.last == end});
  }
}

// Others' queries as an int8 cache reads them.
void PromptAttention::quantize_arrived(const Context& ctx, const dist::ContextStep& step) {
  for (const dist::BlockMove& move : step.moves) {
    if (move.kind != dist::BlockKind::kQueries || move.to != me()) continue;
    Owner& owner = owners_[static_cast<size_t>(move.owner)];
    const int64_t of_row = query_cols_ / kQuantBlock;
    owner.blocks.resize(static_cast<size_t>(owner.rows * of_row));
    ctx.pool.parallel_for(owner.rows, 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        ctx.kernels.quantize_int8(owner.queries.data() + row * query_cols_, query_cols_,
                                  owner.blocks.data() + row * of_row);
      }
    });
  }
}

}  // namespace millrace::cpu
