#include "dist/context_plan.h"

#include <algorithm>
#include <bit>
#include <map>
#include <set>

#include "base/error.h"

namespace millrace::dist {
namespace {

int64_t chunks_in(int64_t tokens) { return (tokens + kContextChunk - 1) / kContextChunk; }

ChunkRange clipped(int64_t first, int64_t last, int64_t length) {
  first = std::max<int64_t>(first, 0);
  last = std::min(last, length);
  if (first >= last) return {};
  return {first / kContextChunk, chunks_in(last)};
}

int wrap(int rank, int ranks) { return (rank % ranks + ranks) % ranks; }

}  // namespace

ChunkRange chunks_of(const TokenRun& run) { return {run.first / kContextChunk, chunks_in(run.last)}; }

std::vector<TokenRun> ContextLayout::runs(int rank) const {
  std::vector<TokenRun> found;
  for (size_t s = 0; s < lengths.size(); ++s) {
    const int sequence = static_cast<int>(s);
    for (size_t c = 0; c < owner[s].size(); ++c) {
      if (owner[s][c] != rank) continue;
      const int64_t first = static_cast<int64_t>(c) * kContextChunk;
      const int64_t last = std::min(first + kContextChunk, lengths[s]);
      if (!found.empty() && found.back().sequence == sequence && found.back().last == first) {
        found.back().last = last;
      } else {
        found.push_back({sequence, first, last});
      }
    }
  }
  return found;
}

int64_t ContextLayout::rows(int rank) const {
  int64_t total = 0;
  for (const TokenRun& run : runs(rank)) total += run.rows();
  return total;
}

ContextLayout zigzag_layout(const std::vector<int64_t>& lengths, int ranks) {
  if (ranks < 1) throw_error(ErrorCode::kBadInput, "ranks is {}, expected 1 or more", ranks);
  ContextLayout layout{ranks, lengths, {}};
  const int64_t pieces = 2 * int64_t{ranks};
  int first_rank = 0;
  for (size_t s = 0; s < lengths.size(); ++s) {
    if (lengths[s] < 0)
      throw_error(ErrorCode::kBadInput, "lengths[{}] is {}, expected 0 or more", s, lengths[s]);
    const int64_t chunks = chunks_in(lengths[s]);
    std::vector<int>& owner = layout.owner.emplace_back();
    if (chunks < pieces) {
      for (int64_t c = 0; c < chunks; ++c) {
        owner.push_back(wrap(first_rank + static_cast<int>(std::min(c, chunks - 1 - c)), ranks));
      }
      first_rank += static_cast<int>(chunks + 1) / 2;
      continue;
    }
    for (int64_t p = 0; p < pieces; ++p) {
      const auto rank = static_cast<int>(std::min(p, pieces - 1 - p));
      for (int64_t c = p * chunks / pieces; c < (p + 1) * chunks / pieces; ++c) owner.push_back(rank);
    }
  }
  return layout;
}

void append_token(ContextLayout& layout, int sequence) {
  if (sequence < 0 || static_cast<size_t>(sequence) >= layout.lengths.size()) {
    throw_error(ErrorCode::kBadInput, "sequence is {}, expected 0 to {}", sequence,
                layout.lengths.size() - 1);
  }
  const auto s = static_cast<size_t>(sequence);
  if (layout.lengths[s] % kContextChunk == 0) {
    int fewest = 0;
    for (int rank = 1; rank < layout.ranks; ++rank) {
      if (layout.rows(rank) < layout.rows(fewest)) fewest = rank;
    }
    layout.owner[s].push_back(fewest);
  }
  ++layout.lengths[s];
}

void check_layout(const ContextLayout& layout) {
  if (layout.ranks < 1)
    throw_error(ErrorCode::kBadInput, "layout.ranks is {}, expected 1 or more", layout.ranks);
  if (layout.owner.size() != layout.lengths.size()) {
    throw_error(ErrorCode::kBadInput, "layout.owner has {} sequences, expected {}", layout.owner.size(),
                layout.lengths.size());
  }
  for (size_t s = 0; s < layout.lengths.size(); ++s) {
    const int64_t chunks = chunks_in(layout.lengths[s]);
    if (static_cast<int64_t>(layout.owner[s].size()) != chunks) {
      throw_error(ErrorCode::kBadInput, "layout.owner[{}] has {} chunks, expected {} of {} tokens", s,
                  layout.owner[s].size(), chunks, layout.lengths[s]);
    }
    for (const int rank : layout.owner[s]) {
      if (rank < 0 || rank >= layout.ranks) {
        throw_error(ErrorCode::kBadInput, "layout.owner[{}] names rank {}, expected 0 to {}", s, rank,
                    layout.ranks - 1);
      }
    }
  }
}

ChunkRange keys_seen(const TokenRun& queries, int64_t length, const ContextMask& mask) {
  const int64_t first = mask.left < 0 ? 0 : queries.first - mask.left;
  const int64_t last = mask.right < 0 ? length : queries.last + mask.right;
  return clipped(first, last, length);
}

ChunkRange queries_seeing(const TokenRun& keys, int64_t length, const ContextMask& mask) {
  const int64_t first = mask.right < 0 ? 0 : keys.first - mask.right;
  const int64_t last = mask.left < 0 ? length : keys.last + mask.left;
  return clipped(first, last, length);
}

ChunkRange intersection(const ChunkRange& a, const ChunkRange& b) {
  const ChunkRange both{std::max(a.first, b.first), std::min(a.last, b.last)};
  return both.empty() ? ChunkRange{} : both;
}

ChunkNode root_of(const ChunkRange& all) {
  const auto level = static_cast<int>(std::bit_width(static_cast<uint64_t>(all.first ^ (all.last - 1))));
  return {level, all.first >> level};
}

std::vector<ChunkNode> nodes_of(const ChunkRange& all, const std::vector<bool>& part) {
  std::vector<ChunkNode> found;
  if (all.empty()) return found;
  const auto visit = [&](const auto& self, ChunkNode node) -> void {
    const ChunkRange span = intersection(node.span(), all);
    if (span.empty()) return;
    const auto first = part.begin() + (span.first - all.first), last = part.begin() + (span.last - all.first);
    const auto held = std::count(first, last, true);
    if (held == 0) return;
    if (held == span.last - span.first) {
      found.push_back(node);
      return;
    }
    self(self, ChunkNode{node.level - 1, 2 * node.index});
    self(self, ChunkNode{node.level - 1, 2 * node.index + 1});
  };
  visit(visit, root_of(all));
  return found;
}

std::vector<ChunkNode> nodes_of(const ChunkRange& all, const ChunkRange& part) {
  std::vector<bool> held(static_cast<size_t>(std::max<int64_t>(all.last - all.first, 0)), false);
  const ChunkRange both = intersection(all, part);
  for (int64_t c = both.first; c < both.last; ++c) held[static_cast<size_t>(c - all.first)] = true;
  return nodes_of(all, held);
}

// ---------------------------------------------------------------- schedules

namespace {

ContextStep empty_step(int ranks) {
  return {{}, std::vector<std::vector<ContextTile>>(static_cast<size_t>(ranks))};
}

BlockMove whole_move(const ContextLayout& layout, BlockKind kind, int owner, int from, int to) {
  return {kind, owner, from, to, layout.runs(owner)};
}

}  // namespace

ContextSchedule mesh_schedule(const ContextLayout& layout, int a) {
  const int n = layout.ranks;
  if (a < 1 || a > n || n % a != 0) {
    throw_error(ErrorCode::kBadInput, "a is {}, expected a divisor of the {} ranks", a, n);
  }
  const int b = n / a;
  ContextSchedule schedule{a == 1 ? "ring" : fmt::format("mesh {} x {}", a, b), n, {}};
  // Rank j b + i: its queries go round the a ranks of the same i, its keys round the b neighbours of the same
  // j.
  const auto with_j = [&](int rank, int step) { return wrap(rank / b + step, a) * b + rank % b; };
  const auto with_i = [&](int rank, int step) { return rank / b * b + wrap(rank % b + step, b); };
  for (int t = 0; t < a + b - 1; ++t) {
    ContextStep step = empty_step(n);
    const int hop = t - (a - 1);  // of keys, once it is 0
    for (int rank = 0; rank < n; ++rank) {
      auto& tiles = step.tiles[static_cast<size_t>(rank)];
      if (hop <= 0) {
        tiles.push_back({with_j(rank, -t), rank});
      } else {
        for (int j = 0; j < a; ++j) tiles.push_back({with_j(rank, -j), with_i(rank, -hop)});
      }
      if (hop < 0) {
        step.moves.push_back(
            whole_move(layout, BlockKind::kQueries, with_j(rank, -t), rank, with_j(rank, 1)));
      } else if (hop < b - 1) {
        step.moves.push_back(whole_move(layout, BlockKind::kKeys, with_i(rank, -hop), rank, with_i(rank, 1)));
      }
    }
    schedule.steps.push_back(std::move(step));
  }
  return schedule;
}

ContextSchedule ring_schedule(const ContextLayout& layout) { return mesh_schedule(layout, 1); }

ContextSchedule wallfacer_schedule(const ContextLayout& layout, int team) {
  const int n = layout.ranks, c = team;
  if (c < 1 || n % (c * c) != 0) {
    throw_error(ErrorCode::kBadInput, "team is {}, expected one whose square divides the {} ranks", c, n);
  }
  const int teams = n / c, rounds = teams / c;
  ContextSchedule schedule{fmt::format("wallfacer {}", c), n, {}};
  const auto rank_of = [&](int t, int m) { return wrap(t, teams) * c + m; };
  const auto first_team = [&](int rank) {
    return rank / c + rank % c * rounds;
  };  // its member's ring begins here
  // The first step: a team's queries to all of it, and the keys that each ring begins with.
  ContextStep start = empty_step(n);
  for (int rank = 0; rank < n; ++rank) {
    start.tiles[static_cast<size_t>(rank)].clear();
    for (int m = 0; m < c; ++m) {
      const int mate = rank_of(rank / c, m), key = rank_of(first_team(rank), m);
      if (mate != rank) start.moves.push_back(whole_move(layout, BlockKind::kQueries, mate, mate, rank));
      if (key != rank) start.moves.push_back(whole_move(layout, BlockKind::kKeys, key, key, rank));
    }
    if (wrap(first_team(rank), teams) == rank / c)
      start.tiles[static_cast<size_t>(rank)].push_back({rank, rank});
  }
  schedule.steps.push_back(std::move(start));
  for (int s = 0; s < rounds; ++s) {
    ContextStep step = empty_step(n);
    for (int rank = 0; rank < n; ++rank) {
      const int at = first_team(rank) + s;
      for (int m = 0; m < c; ++m) {
        const int key = rank_of(at, m);
        for (int q = 0; q < c; ++q) {
          const int mate = rank_of(rank / c, q);
          if (key != rank || mate != rank) step.tiles[static_cast<size_t>(rank)].push_back({mate, key});
        }
        if (s + 1 < rounds) {
          const int to = rank_of(rank / c - 1, rank % c);  // whose ring is where this one was
          if (key != to) step.moves.push_back(whole_move(layout, BlockKind::kKeys, key, rank, to));
        }
      }
    }
    schedule.steps.push_back(std::move(step));
  }
  return schedule;
}

namespace {

// Runs of `owner`, of which some query of `reader` sees something, cut to whole chunks.
std::vector<TokenRun> runs_needed(const ContextLayout& layout, const ContextMask& mask, int owner,
                                  int reader) {
  std::vector<TokenRun> needed;
  for (const TokenRun& keys : layout.runs(owner)) {
    const int64_t length = layout.lengths[static_cast<size_t>(keys.sequence)];
    std::set<int64_t> chunks;
    for (const TokenRun& queries : layout.runs(reader)) {
      if (queries.sequence != keys.sequence) continue;
      const ChunkRange both = intersection(keys_seen(queries, length, mask), chunks_of(keys));
      for (int64_t c = both.first; c < both.last; ++c) chunks.insert(c);
    }
    for (const int64_t c : chunks) {
      const int64_t first = c * kContextChunk, last = std::min(first + kContextChunk, length);
      if (!needed.empty() && needed.back().sequence == keys.sequence && needed.back().last == first) {
        needed.back().last = last;
      } else {
        needed.push_back({keys.sequence, first, last});
      }
    }
  }
  return needed;
}

}  // namespace

ContextSchedule window_schedule(const ContextLayout& layout, const ContextMask& mask) {
  const int n = layout.ranks;
  ContextSchedule schedule{"window", n, {}};
  ContextStep first = empty_step(n), second = empty_step(n);
  for (int rank = 0; rank < n; ++rank) {
    first.tiles[static_cast<size_t>(rank)].push_back({rank, rank});
    for (int hop = 1; hop < n; ++hop) {
      const int owner = wrap(rank - hop, n);
      std::vector<TokenRun> runs = runs_needed(layout, mask, owner, rank);
      if (runs.empty()) continue;
      first.moves.push_back({BlockKind::kKeys, owner, owner, rank, std::move(runs)});
      second.tiles[static_cast<size_t>(rank)].push_back({rank, owner});
    }
  }
  schedule.steps = {std::move(first), std::move(second)};
  return schedule;
}

namespace {

bool contained(const TokenRun& run, const std::vector<TokenRun>& in) {
  return std::any_of(in.begin(), in.end(), [&](const TokenRun& of) {
    return of.sequence == run.sequence && of.first <= run.first && run.last <= of.last;
  });
}

// Walks through a schedule: who holds what, and what was computed.
struct ScheduleCheck {
  ScheduleCheck(const ContextLayout& of, const ContextMask& seen) : layout(of), mask(seen) {
    for (int rank = 0; rank < of.ranks; ++rank) {
      for (const BlockKind kind : {BlockKind::kQueries, BlockKind::kKeys})
        held[{kind, rank, rank}] = of.runs(rank);
    }
  }
  void tile(size_t step, int rank, const ContextTile& tile) {
    const auto queries = held.find({BlockKind::kQueries, tile.queries, rank});
    const auto keys = held.find({BlockKind::kKeys, tile.keys, rank});
    bool whole = queries != held.end() && keys != held.end();
    if (whole) {
      for (const TokenRun& run : runs_needed(layout, mask, tile.keys, tile.queries)) {
        whole = whole && contained(run, keys->second);
      }
    }
    if (!whole) {
      throw_error(ErrorCode::kBadInput, "schedule.steps[{}]: rank {} lacks what tile {} x {} needs", step,
                  rank, tile.queries, tile.keys);
    }
    if (!done.insert({tile.queries, tile.keys}).second) {
      throw_error(ErrorCode::kBadInput, "schedule.steps[{}]: tile {} x {} is computed twice", step,
                  tile.queries, tile.keys);
    }
  }
  void move(size_t step, const BlockMove& move) const {
    const int n = layout.ranks;
    if (move.from < 0 || move.from >= n || move.to < 0 || move.to >= n || move.from == move.to) {
      throw_error(ErrorCode::kBadInput, "schedule.steps[{}]: a move from rank {} to {}, expected two of {}",
                  step, move.from, move.to, n);
    }
    const auto from = held.find({move.kind, move.owner, move.from});
    bool has = from != held.end();
    for (const TokenRun& run : move.runs) has = has && contained(run, from->second);
    if (has && move.kind == BlockKind::kQueries) has = move.runs == layout.runs(move.owner);  // always whole
    if (!has) {
      throw_error(ErrorCode::kBadInput, "schedule.steps[{}]: rank {} sends what it lacks, of owner {}", step,
                  move.from, move.owner);
    }
  }
  void finish() const {
    for (int queries = 0; queries < layout.ranks; ++queries) {
      for (int keys = 0; keys < layout.ranks; ++keys) {
        if (!done.contains({queries, keys}) && !runs_needed(layout, mask, keys, queries).empty()) {
          throw_error(ErrorCode::kBadInput, "schedule: tile {} x {} is never computed", queries, keys);
        }
      }
    }
  }

  const ContextLayout& layout;
  const ContextMask& mask;
  std::map<std::tuple<BlockKind, int, int>, std::vector<TokenRun>> held;  // kind, owner, rank
  std::set<std::pair<int, int>> done;
};

}  // namespace

void check_schedule(const ContextSchedule& schedule, const ContextLayout& layout, const ContextMask& mask) {
  const int n = layout.ranks;
  if (schedule.ranks != n) {
    throw_error(ErrorCode::kBadInput, "schedule.ranks is {}, expected the layout's {}", schedule.ranks, n);
  }
  ScheduleCheck check(layout, mask);
  for (size_t s = 0; s < schedule.steps.size(); ++s) {
    const ContextStep& step = schedule.steps[s];
    if (static_cast<int>(step.tiles.size()) != n) {
      throw_error(ErrorCode::kBadInput, "schedule.steps[{}].tiles has {} ranks, expected {}", s,
                  step.tiles.size(), n);
    }
    for (int rank = 0; rank < n; ++rank) {
      for (const ContextTile& tile : step.tiles[static_cast<size_t>(rank)]) check.tile(s, rank, tile);
    }
    for (const BlockMove& move : step.moves) check.move(s, move);
    for (const BlockMove& move : step.moves) check.held[{move.kind, move.owner, move.to}] = move.runs;
  }
  check.finish();
}

// ---------------------------------------------------------------- bytes

std::vector<RankBytes> forward_bytes(const ContextSchedule& schedule, const ContextLayout& layout,
                                     const ContextMask& mask, const ContextShape& shape, PartialOrder order) {
  std::vector<RankBytes> bytes(static_cast<size_t>(layout.ranks));
  const auto add = [&](int from, int to, int64_t count) {
    bytes[static_cast<size_t>(from)].sent += count;
    bytes[static_cast<size_t>(to)].received += count;
  };
  const int64_t query = int64_t{shape.heads} * shape.head_dim * shape.element_bytes;
  const int64_t key = int64_t{shape.kv_heads} * (shape.head_dim + shape.value_dim) * shape.element_bytes;
  const int64_t partial = int64_t{shape.heads} * (shape.value_dim + 1) * 4;
  std::map<std::pair<int, int>, std::set<int>> keys_of;  // rank, owner of queries: whose keys it met
  for (const ContextStep& step : schedule.steps) {
    for (const BlockMove& move : step.moves) {
      int64_t rows = 0;
      for (const TokenRun& run : move.runs) rows += run.rows();
      add(move.from, move.to, rows * (move.kind == BlockKind::kQueries ? query : key));
    }
    for (int rank = 0; rank < layout.ranks; ++rank) {
      for (const ContextTile& tile : step.tiles[static_cast<size_t>(rank)]) {
        if (tile.queries != rank) keys_of[{rank, tile.queries}].insert(tile.keys);
      }
    }
  }
  for (const auto& [pair, owners] : keys_of) {
    for (const TokenRun& run : layout.runs(pair.second)) {
      if (order == PartialOrder::kCompact) {
        add(pair.first, pair.second, run.rows() * partial);
        continue;
      }
      const auto s = static_cast<size_t>(run.sequence);
      const ChunkRange all = keys_seen(run, layout.lengths[s], mask);
      std::vector<bool> part(static_cast<size_t>(all.last - all.first));
      for (size_t i = 0; i < part.size(); ++i) {
        part[i] = owners.contains(layout.owner[s][static_cast<size_t>(all.first) + i]);
      }
      add(pair.first, pair.second, static_cast<int64_t>(nodes_of(all, part).size()) * run.rows() * partial);
    }
  }
  return bytes;
}

double formula_bytes(const ContextShape& shape, int64_t tokens, int a, int b) {
  const double query = double{1} * shape.heads * shape.head_dim * shape.element_bytes;
  const double key = double{1} * shape.kv_heads * (shape.head_dim + shape.value_dim) * shape.element_bytes;
  const double partial = double{1} * shape.heads * (shape.value_dim + 1) * 4;
  return ((a - 1) * (query + partial) + (b - 1) * key) * static_cast<double>(tokens) / (double{1} * a * b);
}

int best_mesh(const ContextShape& shape, int ranks) {
  int best = 1;
  for (int a = 2; a <= ranks; ++a) {
    if (ranks % a == 0 &&
        formula_bytes(shape, ranks, a, ranks / a) < formula_bytes(shape, ranks, best, ranks / best)) {
      best = a;
    }
  }
  return best;
}

}  // namespace millrace::dist
