#include "dist/shares.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "base/error.h"

namespace millrace::dist {
namespace {

// [shares + 1]: `units` in proportion to the speeds.
std::vector<int64_t> cut_units(int64_t units, const std::vector<double>& speeds) {
  const double all = std::accumulate(speeds.begin(), speeds.end(), 0.0);
  std::vector<int64_t> bounds(speeds.size() + 1, 0);
  double before = 0;
  for (size_t r = 0; r < speeds.size(); ++r) {
    before += speeds[r];
    bounds[r + 1] =
        std::clamp<int64_t>(std::llround(before / all * static_cast<double>(units)), bounds[r], units);
  }
  bounds.back() = units;
  return bounds;
}

}  // namespace

Shares Shares::grid(int rank, int ranks_of_stage, std::vector<double> speeds) {
  const Shares checked(rank, std::move(speeds));
  MILLRACE_CHECK(ranks_of_stage > 0 && checked.ranks() % ranks_of_stage == 0);
  const auto begin = [&](int stage) { return checked.speeds_.begin() + stage * ranks_of_stage; };
  const int stage = rank / ranks_of_stage;
  Shares shares(rank % ranks_of_stage, std::vector<double>(begin(stage), begin(stage + 1)));
  shares.stage_ = stage;
  shares.stage_speeds_.clear();
  for (int s = 0; s < checked.ranks() / ranks_of_stage; ++s) {
    shares.stage_speeds_.push_back(std::accumulate(begin(s), begin(s + 1), 0.0));
  }
  return shares;
}

Shares Shares::within_stage() const {
  Shares shares = *this;
  shares.stage_ = 0;
  shares.stage_speeds_ = {1.0};
  return shares;
}

Shares Shares::between_stages() const {
  Shares shares = *this;
  shares.rank_ = 0;
  shares.speeds_ = {1.0};
  return shares;
}

Shares Shares::context(int rank, int ranks, ScheduleKind schedule) {
  even(rank, ranks);  // throws for numbers that cannot be
  Shares shares = even(0, 1);
  shares.context_rank_ = rank;
  shares.context_ranks_ = ranks;
  shares.context_schedule_ = schedule;
  return shares;
}

Range Shares::layers_of(int stage, int64_t total) const {
  std::vector<int64_t> bounds = cut_units(total, stage_speeds_);
  const auto stages = static_cast<int64_t>(stage_speeds_.size());
  // However slow a stage is, it has a layer where there are enough.
  for (int64_t i = 1; i < stages && total >= stages; ++i) {
    int64_t& bound = bounds[static_cast<size_t>(i)];
    bound = std::clamp(bound, bounds[static_cast<size_t>(i) - 1] + 1, total - (stages - i));
  }
  return {bounds[static_cast<size_t>(stage)], bounds[static_cast<size_t>(stage) + 1]};
}

Shares::Shares(int rank, std::vector<double> speeds) : rank_(rank), speeds_(std::move(speeds)) {
  if (speeds_.empty() || ranks() > kMaxTensorRanks) {
    throw_error(ErrorCode::kBadInput, "ranks: found {}, expected 1 to {}", ranks(), kMaxTensorRanks);
  }
  for (const double speed : speeds_) {
    if (!(speed > 0) || !std::isfinite(speed)) {
      throw_error(ErrorCode::kBadInput, "speed of a rank: found {}, expected a number above 0", speed);
    }
  }
  MILLRACE_CHECK(rank >= 0 && rank < ranks());
}

std::vector<int64_t> Shares::cut(int64_t total) const {
  int64_t unit = 32;
  while (unit > 1 && total / unit < ranks()) unit /= 2;
  std::vector<int64_t> bounds = cut_units((total + unit - 1) / unit, speeds_);
  for (int64_t& bound : bounds) bound = std::min(bound * unit, total);
  return bounds;
}

Range Shares::rows_of(int rank, int64_t total) const {
  const std::vector<int64_t> bounds = cut(total);
  return {bounds[static_cast<size_t>(rank)], bounds[static_cast<size_t>(rank) + 1]};
}

Shares Shares::with_whole_experts() const {
  Shares shares = *this;
  shares.whole_experts_ = true;
  return shares;
}

Shares Shares::with_whole_attention() const {
  Shares shares = *this;
  shares.whole_attention_ = true;
  return shares;
}

Range Shares::experts_of(int rank, int64_t total) const {
  const std::vector<int64_t> bounds = cut_units(total, speeds_);
  return {bounds[static_cast<size_t>(rank)], bounds[static_cast<size_t>(rank) + 1]};
}

// With as many KV heads as ranks, whole groups of query heads; with fewer, ranks share a KV head and cut its
// group.
Shares::Heads Shares::heads_of(int rank, int64_t heads, int64_t kv_heads) const {
  if (whole_attention_) return {{0, heads}, {0, kv_heads}};
  const int64_t group = heads / kv_heads;
  if (kv_heads >= ranks()) {
    const std::vector<int64_t> bounds = cut_units(kv_heads, speeds_);
    const Range kv{bounds[static_cast<size_t>(rank)], bounds[static_cast<size_t>(rank) + 1]};
    return {{kv.begin * group, kv.end * group}, kv};
  }
  // KV head h is of ranks [first(h), first(h + 1)).
  const auto first = [&](int64_t h) { return (h * ranks() + kv_heads - 1) / kv_heads; };
  int64_t head = 0;
  while (first(head + 1) <= rank) ++head;
  const int64_t sharers = first(head + 1) - first(head), place = rank - first(head);
  const Range query{head * group + place * group / sharers, head * group + (place + 1) * group / sharers};
  if (query.size() == 0) return {query, {head, head}};
  return {query, {head, head + 1}};
}

}  // namespace millrace::dist
