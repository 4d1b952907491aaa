#include "dist/prompt_plan.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace millrace::dist {

std::optional<ScheduleKind> schedule_kind(std::string_view name) {
  for (const auto& [kind, word] :
       {std::pair{ScheduleKind::kAuto, "auto"}, std::pair{ScheduleKind::kRing, "ring"},
        std::pair{ScheduleKind::kMesh, "mesh"}, std::pair{ScheduleKind::kWallfacer, "wallfacer"}}) {
    if (name == word) return kind;
  }
  return std::nullopt;
}

RowRange zigzag_rows(int64_t rows, int ranks, int piece) {
  return {rows * piece / (2 * ranks), rows * (piece + 1) / (2 * ranks)};
}

int64_t PromptLayout::rows(int owner) const {
  int64_t total = 0;
  for (const QueryRun& run : queries[static_cast<size_t>(owner)]) total += run.rows();
  return total;
}

int64_t PromptLayout::most_rows() const {
  int64_t most = 0;
  for (int owner = 0; owner < ranks; ++owner) most = std::max(most, rows(owner));
  return most;
}

RowRange PromptLayout::blocks_of(int64_t split) const {
  return {std::max(split * kShelfBlocks, first_block), std::min((split + 1) * kShelfBlocks, last_block)};
}

int64_t PromptLayout::blocks(int owner, RowRange splits) const {
  int64_t total = 0;
  for (int64_t split = splits.begin; split < splits.end; ++split) {
    if (owner_of(split) != owner) continue;
    const RowRange blocks = blocks_of(split);
    total += std::max<int64_t>(0, blocks.end - blocks.begin);
  }
  return total;
}

RowRange PromptLayout::seen_by(const QueryRun& run, int64_t split) const {
  const int64_t begin = split * kPromptSplit, end = begin + kPromptSplit;
  const int64_t from = std::max(run.first, begin);
  // The last row whose chunk begins before the split's end.
  const int64_t to = chunk == 0 ? run.last : std::min(run.last, (end + chunk - 1) / chunk * chunk);
  if (from >= to) return {};
  return {from - run.first, to - run.first};
}

PromptLayout prompt_layout(int ranks, int64_t context, int64_t rows, int64_t chunk,
                           const std::vector<int64_t>* wants) {
  PromptLayout layout;
  layout.ranks = ranks;
  layout.chunk = chunk;
  layout.first_block = (chunk == 0 ? 0 : context / chunk * chunk) / kBlockTokens;
  layout.last_block = blocks_for(context + rows);
  layout.queries.resize(static_cast<size_t>(ranks));
  for (int piece = 0; piece < 2 * ranks; ++piece) {
    std::vector<QueryRun>& runs = layout.queries[static_cast<size_t>(zigzag_rank(ranks, piece))];
    const auto [begin, end] = zigzag_rows(rows, ranks, piece);
    if (wants == nullptr) {
      if (begin < end) runs.push_back({context + begin, context + end});
      continue;
    }
    bool follows = false;  // the row before
    for (const int64_t row : *wants) {
      if (row < begin || row >= end) continue;
      if (follows && runs.back().last == context + row) {
        ++runs.back().last;
      } else {
        runs.push_back({context + row, context + row + 1});
      }
      follows = true;
    }
  }
  return layout;
}

std::vector<RankBytes> prompt_bytes(const ContextSchedule& schedule, const PromptLayout& layout,
                                    const PromptShape& shape) {
  const int n = layout.ranks;
  const auto count = static_cast<size_t>(n);
  std::vector<int64_t> queries(count), keys(count), partials(count * count);  // bytes; [queries][keys]
  const RowRange all{layout.first_split(), layout.last_split()};
  for (int owner = 0; owner < n; ++owner) {
    const auto o = static_cast<size_t>(owner);
    queries[o] = layout.rows(owner) * shape.query_bytes;
    keys[o] = layout.blocks(owner, all) * shape.block_bytes;
    for (int64_t split = all.begin; split < all.end; ++split) {
      for (const QueryRun& run : layout.queries[o]) {
        const RowRange seen = layout.seen_by(run, split);
        partials[o * count + static_cast<size_t>(layout.owner_of(split))] +=
            (seen.end - seen.begin) * shape.partial_bytes;
      }
    }
  }
  std::vector<RankBytes> bytes(count);
  const auto add = [&](int from, int to, int64_t moved) {
    bytes[static_cast<size_t>(from)].sent += moved;
    bytes[static_cast<size_t>(to)].received += moved;
  };
  for (const ContextStep& step : schedule.steps) {
    for (const BlockMove& move : step.moves) {
      const auto owner = static_cast<size_t>(move.owner);
      add(move.from, move.to, move.kind == BlockKind::kQueries ? queries[owner] : keys[owner]);
    }
    for (int rank = 0; rank < n; ++rank) {
      for (const ContextTile& tile : step.tiles[static_cast<size_t>(rank)]) {
        if (tile.queries == rank) continue;
        add(rank, tile.queries,
            partials[static_cast<size_t>(tile.queries) * count + static_cast<size_t>(tile.keys)]);
      }
    }
  }
  return bytes;
}

ContextSchedule choose_schedule(ScheduleKind kind, const PromptLayout& layout, const PromptShape& shape) {
  const int n = layout.ranks;
  const ContextLayout ranks_only{n, {}, {}};  // who meets whom; what they hold is the prompt's
  std::vector<ContextSchedule> candidates;
  if (kind == ScheduleKind::kRing || kind == ScheduleKind::kAuto) {
    candidates.push_back(ring_schedule(ranks_only));
  }
  if (kind == ScheduleKind::kMesh || kind == ScheduleKind::kAuto) {
    for (int a = 2; a <= n; ++a) {
      if (n % a == 0) candidates.push_back(mesh_schedule(ranks_only, a));
    }
  }
  if (kind == ScheduleKind::kWallfacer || kind == ScheduleKind::kAuto) {
    for (int team = 2; team * team <= n; ++team) {
      if (n % (team * team) == 0) candidates.push_back(wallfacer_schedule(ranks_only, team));
    }
    if (candidates.empty()) candidates.push_back(wallfacer_schedule(ranks_only, 1));
  }
  MILLRACE_CHECK(!candidates.empty());
  const auto most = [&](const ContextSchedule& schedule) {
    int64_t received = 0;
    for (const RankBytes& rank : prompt_bytes(schedule, layout, shape)) {
      received = std::max(received, rank.received);
    }
    return received;
  };
  size_t best = 0;
  int64_t least = most(candidates[0]);
  for (size_t i = 1; i < candidates.size(); ++i) {
    const int64_t received = most(candidates[i]);
    if (received >= least) continue;
    least = received;
    best = i;
  }
  return std::move(candidates[best]);
}

int64_t kept_rows_received(int ranks, int rank, int64_t context, int64_t rows, bool spread) {
  int64_t received = 0;
  for (int piece = 0; piece < 2 * ranks; ++piece) {
    if (zigzag_rank(ranks, piece) == rank) continue;
    const auto [begin, end] = zigzag_rows(rows, ranks, piece);
    for (int64_t row = begin; row < end; ++row) {
      received += !spread || (context + row) / kPromptSplit % ranks == rank ? 1 : 0;
    }
  }
  return received;
}

}  // namespace millrace::dist
