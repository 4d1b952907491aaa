// Scores of a tile: scale, soft cap and mask, the same for forward and backward; and which tiles of keys a
// tile of query rows goes through.
#pragma once

#include <stdint.h>

#include "kernels/cpu/attention/flash_rows.h"
#include "kernels/cpu/attention/flash_task.h"
#include "kernels/cpu/simd/exp.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/tanh.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

struct FlashScratch {
  explicit FlashScratch(const FlashTask& task) : at(task.scratch) {}
  float* take(int64_t floats) {
    float* taken = at;
    at += floats;
    return taken;
  }
  float* take_tile(int32_t dims) { return take(int64_t{dims} * kFlashTile + kFlashSlack); }
  float* at;
};

// The tiles of a task whose lanes are query rows, and the keys and values that all of them read.
template <class Tile>
struct FlashQueryTilesOf {
  explicit FlashQueryTilesOf(const FlashTask& task) {
    FlashScratch scratch(task);
    keys = scratch.take_tile(task.problem->head_dim);
    values = scratch.take_tile(task.problem->value_dim);
    for (; count < kFlashTiles; ++count) {
      const FlashTask part = task.tile(count, task.num_heads);
      if (part.count == 0) break;
      tiles[count].begin(part, scratch);
    }
  }
  int32_t count = 0;
  float* keys;    // [64][head_dim]
  float* values;  // [64][value_dim]
  Tile tiles[kFlashTiles];
};

// The keys that each lane of a tile of query rows sees.
struct LaneRanges {
  void set(const FlashTask& task) {
    for (int32_t r = 0; r < whole_lanes(task.count); ++r) {
      const int32_t row = r < task.count ? r : 0;  // nobody reads what lanes behind the last row give
      const FlashRange keys = visible_keys(*task.problem, *task.sequence, task.first + row / task.num_heads);
      first[r] = keys.first;
      last[r] = keys.last;
      if (keys.first >= keys.last) {
        all_first = INT32_MAX;
        continue;
      }
      any_first = keys.first < any_first ? keys.first : any_first;
      any_last = keys.last > any_last ? keys.last : any_last;
      all_first = keys.first > all_first ? keys.first : all_first;
      all_last = keys.last < all_last ? keys.last : all_last;
    }
  }
  bool whole(int32_t from, int32_t to) const { return all_first <= from && to <= all_last; }
  bool some(int32_t from, int32_t to) const { return any_first < to && from < any_last; }

  int32_t first[kFlashTile], last[kFlashTile];
  int32_t any_first = INT32_MAX, any_last = 0;  // seen by some lane
  int32_t all_first = 0, all_last = INT32_MAX;  // seen by all
};

// Whether lane j sees row m of a tile whose lanes are queries: low <= m <= high, counted from the tile's
// first key. As floats, which are exact: ranges are cut to the tile.
struct LaneMask {
  LaneMask(const LaneRanges& ranges, int32_t lane, int32_t from) {
    alignas(64) float low_of[kLanes], high_of[kLanes];
    for (int32_t j = 0; j < kLanes; ++j) {
      const int32_t begin = ranges.first[lane + j] - from, end = ranges.last[lane + j] - from;
      low_of[j] = static_cast<float>(begin < 0 ? 0 : begin > kFlashTile ? kFlashTile : begin);
      high_of[j] = static_cast<float>(end < 0 ? -1 : end > kFlashTile ? kFlashTile : end - 1);
    }
    low = Simd::load(low_of);
    high = Simd::load(high_of);
  }
  [[gnu::always_inline]] V16 apply(V16 score, V16 m) const {
    const V16 never = Simd::broadcast(-__builtin_inff());
    return Simd::select_less(m, low, never, Simd::select_less(high, m, never, score));
  }
  V16 low, high;
};

// Calls f(first key, last key) for every tile of keys of which a lane sees some, in order; seen: keys that
// some lane sees.
template <class F>
void for_each_key_tile(const FlashTask& task, FlashRange seen, const F& f) {
  const FlashProblem& p = *task.problem;
  const auto tiles = [&](int32_t from, int32_t to) {
    const int32_t begin = from > seen.first ? from : seen.first / kFlashTile * kFlashTile;
    const int32_t end = to < seen.last ? to : seen.last;
    for (int32_t k = begin; k < end; k += kFlashTile) f(k, k + kFlashTile < end ? k + kFlashTile : end);
  };
  if (p.block_q == 0) return tiles(0, task.sequence->k_len);
  const int64_t block =
      (int64_t{task.sequence_idx} * p.heads + task.head) * p.q_blocks + task.first / p.block_q;
  for (int32_t i = p.row_starts[block]; i < p.row_starts[block + 1]; ++i) {
    tiles(p.columns[i] * p.block_k, (p.columns[i] + 1) * p.block_k);
  }
}

// Keys that some lane of any of the tiles sees.
template <class Tile>
FlashRange seen_keys(const Tile* tiles, int32_t count) {
  FlashRange seen{INT32_MAX, 0};
  for (int32_t i = 0; i < count; ++i) {
    const LaneRanges& of = tiles[i].ranges;
    seen.first = of.any_first < seen.first ? of.any_first : seen.first;
    seen.last = of.any_last > seen.last ? of.any_last : seen.last;
  }
  return seen;
}

struct RowOfTask {
  const FlashTask& task;
  RowHead operator()(int32_t r) const {
    return {task.first + r / task.num_heads, task.head + r % task.num_heads};
  }
};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
