// Attention over tensors, forward: tiles of up to 64 query rows go through their keys 64 at a time, with an
// online softmax, which begins anew with every chunk (flash_chunks.h). A task has up to four such tiles, so
// that keys and values are loaded once for all of them. Lanes are rows, so that maxima, sums and weights are
// of vectors and nothing is reduced across lanes.
#pragma once

#include <stdint.h>

#include "kernels/cpu/attention/flash_chunks.h"
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
    node_floats = int64_t{p.value_dim} * kFlashTile + kFlashTile;
    nodes = scratch.take(p.nodes * node_floats);
  }
  float* node(int32_t i) const { return nodes + i * node_floats; }
  float* node_lse(int32_t i) const { return node(i) + int64_t{task.problem->value_dim} * kFlashTile; }

  FlashTask task;
  LaneRanges ranges;
  ChunkStack chunks;
  bool chunk_begun = false;  // some keys of this chunk were seen
  float* nodes;              // of the tree: each [value_dim][64] and log-sum-exps [64]
  int64_t node_floats;       // of one
  int32_t lanes;             // a multiple of 16
  float* query;              // [head_dim][64]
  float* acc;                // [value_dim][64]
  float* scores;             // [64 keys][64], then weights
  alignas(64) float row_max[kFlashTile];
  alignas(64) float row_sum[kFlashTile];
};

using FlashForwardTiles = FlashQueryTilesOf<FlashForwardTile>;

// Nothing seen.
inline void begin_softmax(FlashForwardTile& t) {
  for (int32_t r = 0; r < t.lanes; ++r) {
    t.row_max[r] = -__builtin_inff();
    t.row_sum[r] = 0.0f;
  }
}
inline void begin_rows(FlashForwardTile& t) {
  begin_softmax(t);
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
  if (!changed || !t.chunk_begun) return;  // of a chunk's first keys: acc is zero
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
    t.chunk_begun = true;
  }
}

// What was seen of a chunk becomes a node: outputs and log-sum-exps.
inline void end_chunk(FlashForwardTile& t, int32_t chunk) {
  if (!t.chunk_begun) return;
  t.chunk_begun = false;
  const int32_t dims = t.task.problem->value_dim;
  const int32_t node = t.chunks.push(t.task.sequence->k_chunk + chunk, [&](int32_t i) {
    flash_merge_lanes(t.node(i), t.node_lse(i), t.node(i + 1), t.node_lse(i + 1), dims, t.lanes);
  });
  alignas(64) float factor[kFlashTile];
  for (int32_t r = 0; r < t.lanes; ++r) {
    const float sum = t.row_sum[r];
    factor[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
    t.node_lse(node)[r] =
        sum == 0.0f ? -__builtin_inff() : static_cast<float>(t.row_max[r] + __builtin_log(sum));
  }
  take_lanes(t.acc, factor, t.node(node), dims, t.lanes);
  begin_softmax(t);
}

// All chunks, then the sink, once: not of a partial.
inline void end_rows(FlashForwardTile& t, float* staging) {
  const FlashSequence& s = *t.task.sequence;
  const float* const sinks = t.task.problem->sinks;
  const int32_t dims = t.task.problem->value_dim;
  t.chunks.finish([&](int32_t i) {
    flash_merge_lanes(t.node(i), t.node_lse(i), t.node(i + 1), t.node_lse(i + 1), dims, t.lanes);
  });
  float* const lse = t.node_lse(0);
  if (t.chunks.depth == 0) {  // no row has seen a key
    for (int32_t r = 0; r < t.lanes; ++r) lse[r] = -__builtin_inff();
    for (int64_t i = 0; i < int64_t{dims} * kFlashTile; i += kLanes) Simd::store(t.node(0) + i, Simd::zero());
  }
  alignas(64) float factor[kFlashTile], sink[kFlashTile];
  for (int32_t r = 0; r < t.lanes; ++r) {
    factor[r] = 1.0f;
    if (sinks != nullptr) sink[r] = sinks[t.task.head + r % t.task.num_heads];
  }
  for (int32_t lane = 0; sinks != nullptr && lane < t.lanes; lane += kLanes) {
    merge_sinks(lse + lane, sink + lane, factor + lane);
  }
  const RowOfTask row_of{t.task};
  for (int32_t r = 0; s.lse != nullptr && r < t.task.count; ++r) {
    const RowHead at = row_of(r);
    s.lse[at.head * s.row_stride + at.row] = lse[r];
  }
  store_lanes(s.out, t.task.count, dims, t.node(0), factor, staging, row_of);
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
  int32_t chunk = 0;
  const auto end_chunks = [&] {
    for (int32_t i = 0; i < all.count; ++i) end_chunk(all.tiles[i], chunk);
  };
  for_each_key_tile(task, seen, [&](int32_t from, int32_t to) {
    if (from / kFlashChunk != chunk) end_chunks();
    chunk = from / kFlashChunk;
    attend_keys<Math>(all, from, to, seen.last);
  });
  end_chunks();
  for (int32_t i = 0; i < all.count; ++i) end_rows(all.tiles[i], all.values);
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
