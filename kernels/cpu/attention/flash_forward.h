// Attention over tensors, forward: tiles of up to 64 query rows go through their keys 64 at a time, with an
// online softmax. A task has up to four such tiles, so that keys and values are loaded once for all of them.
// Lanes are rows, so that maxima, sums and weights are of vectors and nothing is reduced across lanes.
#pragma once

#include <stdint.h>

#include "kernels/cpu/attention/flash_scores.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

struct FlashForwardTile {
  void begin(const FlashTask& of, FlashScratch& scratch) {
    const FlashProblem& p = *of.problem;
    task = of;
    ranges.set(task);
    lanes = whole_lanes(task.count);
    query = scratch.take_tile(p.head_dim);
    acc = scratch.take_tile(p.value_dim);
    scores = scratch.take(kFlashTile * kFlashTile);
  }
  FlashTask task;
  LaneRanges ranges;
  int32_t lanes;  // a multiple of 16
  float* query;   // [head_dim][64]
  float* acc;     // [value_dim][64]
  float* scores;  // [64 keys][64], then weights
  alignas(64) float row_max[kFlashTile];
  alignas(64) float row_sum[kFlashTile];
};

// The tiles of a task, and the rows that they share.
struct FlashForwardTiles {
  explicit FlashForwardTiles(const FlashTask& task) {
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
  FlashForwardTile tiles[kFlashTiles];
};

// A sink is a key with that score and no value.
inline void begin_rows(FlashForwardTile& t) {
  const float* sinks = t.task.problem->sinks;
  for (int32_t r = 0; r < t.lanes; ++r) {
    t.row_max[r] = sinks == nullptr ? -__builtin_inff() : sinks[t.task.head + r % t.task.num_heads];
    t.row_sum[r] = sinks == nullptr || t.row_max[r] == -__builtin_inff() ? 0.0f : 1.0f;
  }
  for (int32_t d = 0; d < t.task.problem->value_dim; ++d) {
    for (int32_t r = 0; r < t.lanes; r += kLanes) Simd::store(t.acc + d * kFlashTile + r, Simd::zero());
  }
}

// Sixteen lanes: scores of `count` keys from `from` on become weights exp(score - row_max).
template <bool kMasked>
[[gnu::always_inline]] inline void softmax_lanes(FlashForwardTile& t, int32_t lane, int32_t from,
                                                 int32_t count) {
  const FlashProblem& p = *t.task.problem;
  const V16 scale = Simd::broadcast(p.scale), none = Simd::broadcast(-3e38f);
  const LaneMask mask(t.ranges, lane, from);
  float* const scores = t.scores + lane;
  const V16 before = Simd::load(t.row_max + lane);
  V16 largest = before;
  for (int32_t m = 0; m < count; ++m) {
    V16 score = Simd::mul(Simd::load(scores + m * kFlashTile), scale);
    if (p.softcap > 0.0f) score = softcap16(score, p.softcap);
    if constexpr (kMasked) score = mask.apply(score, Simd::broadcast(static_cast<float>(m)));
    Simd::store(scores + m * kFlashTile, score);
    largest = Simd::max(largest, score);
  }
  Simd::store(t.row_max + lane, largest);
  // Rows that have seen nothing yet: any finite number does.
  const V16 top = Simd::select_less(largest, none, Simd::zero(), largest);
  V16 sum = Simd::zero();
  for (int32_t m = 0; m < count; ++m) {
    const V16 weight = exp16_below(Simd::sub(Simd::load(scores + m * kFlashTile), top));
    Simd::store(scores + m * kFlashTile, weight);
    sum = Simd::add(sum, weight);
  }
  const V16 factor = exp16_below(Simd::sub(before, top));
  Simd::store(t.row_sum + lane, Simd::fma(Simd::load(t.row_sum + lane), factor, sum));
  alignas(64) float factors[kLanes];
  Simd::store(factors, factor);
  bool changed = false;
  for (const float f : factors) changed |= f != 1.0f;
  if (!changed) return;
  for (int32_t d = 0; d < p.value_dim; ++d) {
    float* const at = t.acc + d * kFlashTile + lane;
    Simd::store(at, Simd::mul(Simd::load(at), factor));
  }
}

template <class Math>
void attend_keys(FlashForwardTiles& all, int32_t from, int32_t to, int32_t last) {
  const FlashTask& task = all.tiles[0].task;
  const FlashProblem& p = *task.problem;
  const FlashSequence& s = *task.sequence;
  const int32_t count = to - from, head = task.kv_head;
  FlashPrefetch next = next_rows(s.v, from, to, head, p.value_dim);
  Math::load_rows(s.k, from, count, head, p.head_dim, all.keys);
  for (int32_t i = 0; i < all.count; ++i) {
    FlashForwardTile& t = all.tiles[i];
    if (!t.ranges.some(from, to)) continue;
    Math::scores(all.keys, count, p.head_dim, t.query, t.lanes, t.scores, next);
    next = {};
    const bool whole = t.ranges.whole(from, to);
    for (int32_t lane = 0; lane < t.lanes; lane += kLanes) {
      whole ? softmax_lanes<false>(t, lane, from, count) : softmax_lanes<true>(t, lane, from, count);
    }
  }
  next = next_rows(s.k, to, last, head, p.head_dim);
  Math::load_rows(s.v, from, count, head, p.value_dim, all.values);
  Math::prepare(all.values, count, p.value_dim);
  for (int32_t i = 0; i < all.count; ++i) {
    FlashForwardTile& t = all.tiles[i];
    if (!t.ranges.some(from, to)) continue;
    Math::accumulate(all.values, count, p.value_dim, t.scores, t.lanes, t.acc, next);
    next = {};
  }
}

inline void end_rows(FlashForwardTile& t, float* staging) {
  const FlashSequence& s = *t.task.sequence;
  const RowOfTask row_of{t.task};
  alignas(64) float factor[kFlashTile];
  for (int32_t r = 0; r < t.task.count; ++r) {
    const float sum = t.row_sum[r];
    factor[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (s.lse == nullptr) continue;
    const RowHead at = row_of(r);
    s.lse[at.head * s.row_stride + at.row] =
        sum == 0.0f ? -__builtin_inff() : t.row_max[r] + __builtin_logf(sum);
  }
  store_lanes(s.out, t.task.count, t.task.problem->value_dim, t.acc, factor, staging, row_of);
}

template <class Math>
void flash_forward(const FlashTask& task) {
  FlashForwardTiles all(task);
  for (int32_t i = 0; i < all.count; ++i) {
    FlashForwardTile& t = all.tiles[i];
    Math::load_lanes(task.sequence->q, t.task.count, task.problem->head_dim, all.keys, t.query,
                     RowOfTask{t.task});
    begin_rows(t);
  }
  const FlashRange seen = seen_keys(all.tiles, all.count);
  for_each_key_tile(task, seen,
                    [&](int32_t from, int32_t to) { attend_keys<Math>(all, from, to, seen.last); });
  for (int32_t i = 0; i < all.count; ++i) end_rows(all.tiles[i], all.values);
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
