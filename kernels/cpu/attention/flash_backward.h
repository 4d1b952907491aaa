// Attention over tensors, backward, in two passes that recompute the scores, so that every sum has one order
// and one thread:
//
//     P  = exp(S - lse)      dP = d_out V^T      dS = P * (dP - delta) * (1 - (S / softcap)^2)
//     pass over queries      dQ = scale dS K                      lanes are query rows, keys are broadcast
//     pass over keys         dV = P^T d_out,  dK = scale dS^T Q   lanes are keys, query rows are broadcast
//
// Sums over keys, and over queries, are cut into chunks and these added in a tree (flash_chunks.h).
// delta[row] = sum over dimensions of d_out * out. Seven products instead of five, and no atomic addition.
#pragma once

#include <stdint.h>

#include "kernels/cpu/attention/flash_chunks.h"
#include "kernels/cpu/attention/flash_scores.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

inline void zero_lanes(float* sums, int32_t dims) {
  for (int64_t i = 0; i < int64_t{dims} * kFlashTile; i += kLanes) Simd::store(sums + i, Simd::zero());
}

// delta of all query rows of a task.
inline void flash_delta(const FlashTask& task) {
  const FlashSequence& s = *task.sequence;
  const int32_t dims = task.problem->value_dim;
  float* const out = task.scratch;
  float* const grad = out + dims + kFlashSlack;
  for (int32_t r = 0; r < task.count; ++r) {
    const RowHead at = RowOfTask{task}(r);
    load_row(s.out, at.row, at.head, dims, out);
    load_row(s.d_out, at.row, at.head, dims, grad);
    V16 sum = Simd::zero();  // vectors behind a last one of 8 dimensions are zero in both
    for (int32_t d = 0; d < dims; d += kLanes) {
      sum = Simd::fma(Simd::load(out + d), Simd::load(grad + d), sum);
    }
    s.delta[at.head * s.row_stride + at.row] = Simd::reduce_sum(sum);
  }
}

// lse of a row that sees nothing is -infinity: all its scores are too, and any finite number does.
inline float finite_lse(const FlashSequence& s, RowHead at) {
  const float lse = s.lse[at.head * s.row_stride + at.row];
  return lse == -__builtin_inff() ? 0.0f : lse;
}

// One vector of scores and of dP to weights and dS.
struct FlashGradient {
  V16 weight, d_score;
};
template <class Mask>
[[gnu::always_inline]] inline FlashGradient gradient_of(const FlashProblem& p, V16 product, V16 d_weight,
                                                        V16 lse, V16 delta, const Mask& mask) {
  V16 score = Simd::mul(product, Simd::broadcast(p.scale));
  V16 slope = Simd::sub(d_weight, delta);
  if (p.softcap > 0.0f) {
    score = softcap16(score, p.softcap);
    const V16 bounded = Simd::div(score, Simd::broadcast(p.softcap)), one = Simd::broadcast(1.0f);
    slope = Simd::mul(slope, Simd::sub(one, Simd::mul(bounded, bounded)));
  }
  const V16 weight = exp16(Simd::sub(mask(score), lse));
  return {weight, Simd::mul(weight, slope)};
}

// ---------------------------------------------------------------- dQ: lanes are query rows

struct FlashQueryTile {
  void begin(const FlashTask& of, FlashScratch& scratch) {
    const FlashProblem& p = *of.problem;
    task = of;
    ranges.set(task);
    lanes = whole_lanes(task.count);
    query = scratch.take_tile(p.head_dim);
    sums = scratch.take_tile(p.head_dim);
    d_out = scratch.take_tile(p.value_dim);
    scores = scratch.take(kFlashTile * kFlashTile);
    d_weights = scratch.take(kFlashTile * kFlashTile);
    nodes = scratch.take(int64_t{p.nodes} * p.head_dim * kFlashTile);
  }
  float* node(int32_t i) const { return nodes + int64_t{i} * task.problem->head_dim * kFlashTile; }

  FlashTask task;
  LaneRanges ranges;
  ChunkStack chunks;
  bool chunk_begun = false;  // some keys of this chunk were seen
  float* nodes;              // of the tree: each [head_dim][64]
  int32_t lanes;
  float *query, *sums, *d_out;  // [head_dim][64], [head_dim][64], [value_dim][64]
  float *scores, *d_weights;    // [64 keys][64]; scores become dS
  alignas(64) float lse[kFlashTile];
  alignas(64) float delta[kFlashTile];
};

using FlashQueryTiles = FlashQueryTilesOf<FlashQueryTile>;

template <bool kMasked>
[[gnu::always_inline]] inline void gradient_lanes(FlashQueryTile& t, int32_t lane, int32_t from,
                                                  int32_t count) {
  const V16 lse = Simd::load(t.lse + lane), delta = Simd::load(t.delta + lane);
  const LaneMask mask(t.ranges, lane, from);
  for (int32_t m = 0; m < count; ++m) {
    float* const at = t.scores + m * kFlashTile + lane;
    const V16 d_weight = Simd::load(t.d_weights + m * kFlashTile + lane);
    const FlashGradient g = gradient_of(*t.task.problem, Simd::load(at), d_weight, lse, delta, [&](V16 x) {
      return kMasked ? mask.apply(x, Simd::broadcast(static_cast<float>(m))) : x;
    });
    Simd::store(at, g.d_score);
  }
}

template <class Math>
void add_query_gradients(FlashQueryTiles& all, int32_t from, int32_t to, int32_t last) {
  const FlashTask& task = all.tiles[0].task;
  const FlashProblem& p = *task.problem;
  const FlashSequence& s = *task.sequence;
  const int32_t count = to - from, head = task.kv_head;
  Math::load_rows(s.k, from, count, head, p.head_dim, all.keys);
  Math::load_rows(s.v, from, count, head, p.value_dim, all.values);
  Math::prepare(all.keys, count, p.head_dim);
  FlashPrefetch next_keys = next_rows(s.k, to, last, head, p.head_dim);
  FlashPrefetch next_values = next_rows(s.v, to, last, head, p.value_dim);
  for (int32_t i = 0; i < all.count; ++i) {
    FlashQueryTile& t = all.tiles[i];
    if (!t.ranges.some(from, to)) continue;
    Math::scores(all.keys, count, p.head_dim, t.query, t.lanes, t.scores, next_keys);
    Math::scores(all.values, count, p.value_dim, t.d_out, t.lanes, t.d_weights, next_values);
    next_keys = next_values = {};
    const bool whole = t.ranges.whole(from, to);
    for (int32_t lane = 0; lane < t.lanes; lane += kLanes) {
      whole ? gradient_lanes<false>(t, lane, from, count) : gradient_lanes<true>(t, lane, from, count);
    }
    Math::accumulate(all.keys, count, p.head_dim, t.scores, t.lanes, t.sums, {});
    t.chunk_begun = true;
  }
}

// dQ of a chunk of keys becomes a node.
inline void end_chunk(FlashQueryTile& t, int32_t chunk) {
  if (!t.chunk_begun) return;
  t.chunk_begun = false;
  const FlashProblem& p = *t.task.problem;
  const int32_t node = t.chunks.push(t.task.sequence->k_chunk + chunk, [&](int32_t i) {
    flash_add_lanes(t.node(i), t.node(i + 1), p.head_dim, t.lanes);
  });
  alignas(64) float factor[kFlashTile];
  for (float& f : factor) f = p.scale;
  take_lanes(t.sums, factor, t.node(node), p.head_dim, t.lanes);
}

template <class Math>
void flash_backward_queries(const FlashTask& task) {
  const FlashProblem& p = *task.problem;
  const FlashSequence& s = *task.sequence;
  FlashQueryTiles all(task);
  for (int32_t i = 0; i < all.count; ++i) {
    FlashQueryTile& t = all.tiles[i];
    const RowOfTask row_of{t.task};
    Math::load_lanes(s.q, t.task.count, p.head_dim, all.keys, t.query, row_of);
    Math::load_lanes(s.d_out, t.task.count, p.value_dim, all.values, t.d_out, row_of);
    for (int32_t r = 0; r < t.lanes; ++r) {
      const RowHead at = row_of(r < t.task.count ? r : 0);
      t.lse[r] = finite_lse(s, at);
      t.delta[r] = s.delta[at.head * s.row_stride + at.row];
    }
    zero_lanes(t.sums, p.head_dim);
  }
  const FlashRange seen = seen_keys(all.tiles, all.count);
  int32_t chunk = 0;
  const auto end_chunks = [&] {
    for (int32_t i = 0; i < all.count; ++i) end_chunk(all.tiles[i], chunk);
  };
  for_each_key_tile(task, seen, [&](int32_t from, int32_t to) {
    if (from / kFlashChunk != chunk) end_chunks();
    chunk = from / kFlashChunk;
    add_query_gradients<Math>(all, from, to, seen.last);
  });
  end_chunks();
  float one[kFlashTile];
  for (float& f : one) f = 1.0f;
  for (int32_t i = 0; i < all.count; ++i) {
    FlashQueryTile& t = all.tiles[i];
    if (t.chunks.depth == 0) zero_lanes(t.node(0), p.head_dim);
    t.chunks.finish([&](int32_t n) { flash_add_lanes(t.node(n), t.node(n + 1), p.head_dim, t.lanes); });
    store_lanes(s.d_q, t.task.count, p.head_dim, t.node(0), one, all.keys, RowOfTask{t.task});
  }
}

// ---------------------------------------------------------------- dK, dV: lanes are keys

struct FlashKeyTile {
  void begin(const FlashTask& of, FlashScratch& scratch) {
    const FlashProblem& p = *of.problem;
    task = of;
    lanes = whole_lanes(task.count);
    keys = scratch.take_tile(p.head_dim);
    key_sums = scratch.take_tile(p.head_dim);
    values = scratch.take_tile(p.value_dim);
    value_sums = scratch.take_tile(p.value_dim);
    scores = scratch.take(kFlashTile * kFlashTile);
    d_weights = scratch.take(kFlashTile * kFlashTile);
    key_nodes = scratch.take(int64_t{p.nodes} * p.head_dim * kFlashTile);
    value_nodes = scratch.take(int64_t{p.nodes} * p.value_dim * kFlashTile);
    seeing = seeing_queries(p, *task.sequence, task.first, task.first + task.count);
  }
  // Whether some query of [from, to) of the head sees some of the keys.
  bool seen(int32_t head, int32_t from, int32_t to) const;
  float* key_node(int32_t i) const { return key_nodes + int64_t{i} * task.problem->head_dim * kFlashTile; }
  float* value_node(int32_t i) const {
    return value_nodes + int64_t{i} * task.problem->value_dim * kFlashTile;
  }
  void add_node(int32_t i) {  // node i + 1 into node i
    flash_add_lanes(key_node(i), key_node(i + 1), task.problem->head_dim, lanes);
    flash_add_lanes(value_node(i), value_node(i + 1), task.problem->value_dim, lanes);
  }

  FlashTask task;
  FlashRange seeing;
  ChunkStack chunks;
  bool chunk_begun = false;        // some queries of this chunk see some of the keys
  float *key_nodes, *value_nodes;  // of the tree: each [head_dim][64], [value_dim][64]
  int32_t lanes;
  float *keys, *key_sums;      // [head_dim][64]
  float *values, *value_sums;  // [value_dim][64]
  float *scores, *d_weights;   // [64 queries][64]; become weights and dS
};

struct FlashKeyTiles {
  explicit FlashKeyTiles(const FlashTask& task) {
    FlashScratch scratch(task);
    query = scratch.take_tile(task.problem->head_dim);
    d_out = scratch.take_tile(task.problem->value_dim);
    for (; count < kFlashTiles; ++count) {
      const FlashTask part = task.tile(count, 1);
      if (part.count == 0) break;
      tiles[count].begin(part, scratch);
    }
  }
  int32_t count = 0;
  float *query, *d_out;  // [64][head_dim], [64][value_dim]
  FlashKeyTile tiles[kFlashTiles];
};

// Query `m` of the tile: its weights and dS of all lanes.
inline void gradient_row(FlashKeyTile& t, int32_t m, int32_t query, int32_t head) {
  const FlashProblem& p = *t.task.problem;
  const FlashSequence& s = *t.task.sequence;
  const FlashRange seen = visible_keys(p, s, query);
  const int32_t begin = seen.first - t.task.first, end = seen.last - t.task.first;
  const V16 low = Simd::broadcast(static_cast<float>(begin < 0            ? 0
                                                     : begin > kFlashTile ? kFlashTile
                                                                          : begin));
  const V16 high = Simd::broadcast(static_cast<float>(end < 0 ? 0 : end > kFlashTile ? kFlashTile : end));
  const V16 never = Simd::broadcast(-__builtin_inff());
  const V16 lse = Simd::broadcast(finite_lse(s, {query, head}));
  const V16 delta = Simd::broadcast(s.delta[head * s.row_stride + query]);
  alignas(64) static constexpr float kCount[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int32_t lane = 0; lane < t.lanes; lane += kLanes) {
    float* const score = t.scores + m * kFlashTile + lane;
    float* const d_weight = t.d_weights + m * kFlashTile + lane;
    const V16 key = Simd::add(Simd::load(kCount), Simd::broadcast(static_cast<float>(lane)));
    const FlashGradient g = gradient_of(p, Simd::load(score), Simd::load(d_weight), lse, delta, [&](V16 x) {
      return Simd::select_less(key, low, never, Simd::select_less(key, high, x, never));
    });
    Simd::store(score, g.weight);
    Simd::store(d_weight, g.d_score);
  }
}

// Whether the block of queries that a tile of them lies in has this task's block of keys in its list.
inline bool has_block(const FlashTask& task, int32_t head, int32_t query) {
  const FlashProblem& p = *task.problem;
  if (p.block_q == 0) return true;
  const int64_t block = (int64_t{task.sequence_idx} * p.heads + head) * p.q_blocks + query / p.block_q;
  const int32_t wanted = task.first / p.block_k;
  int32_t low = p.row_starts[block], high = p.row_starts[block + 1];
  while (low < high) {  // the first that is not below
    const int32_t middle = low + (high - low) / 2;
    if (p.columns[middle] < wanted) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < p.row_starts[block + 1] && p.columns[low] == wanted;
}

inline bool FlashKeyTile::seen(int32_t head, int32_t from, int32_t to) const {
  return seeing.first < to && from < seeing.last && has_block(task, head, from);
}

template <class Math>
void add_key_gradients(FlashKeyTiles& all, int32_t head, int32_t from, int32_t to) {
  const FlashTask& task = all.tiles[0].task;
  const FlashProblem& p = *task.problem;
  const FlashSequence& s = *task.sequence;
  const int32_t count = to - from;
  bool loaded = false;
  for (int32_t i = 0; i < all.count; ++i) {
    FlashKeyTile& t = all.tiles[i];
    if (!t.seen(head, from, to)) continue;
    FlashPrefetch next_queries, next_grads;
    if (!loaded) {
      Math::load_rows(s.q, from, count, head, p.head_dim, all.query);
      Math::load_rows(s.d_out, from, count, head, p.value_dim, all.d_out);
      Math::prepare(all.query, count, p.head_dim);
      Math::prepare(all.d_out, count, p.value_dim);
      next_queries = next_rows(s.q, to, s.q_len, head, p.head_dim);
      next_grads = next_rows(s.d_out, to, s.q_len, head, p.value_dim);
      loaded = true;
    }
    Math::scores(all.query, count, p.head_dim, t.keys, t.lanes, t.scores, next_queries);
    Math::scores(all.d_out, count, p.value_dim, t.values, t.lanes, t.d_weights, next_grads);
    for (int32_t m = 0; m < count; ++m) gradient_row(t, m, from + m, head);
    Math::accumulate(all.d_out, count, p.value_dim, t.scores, t.lanes, t.value_sums, {});
    Math::accumulate(all.query, count, p.head_dim, t.d_weights, t.lanes, t.key_sums, {});
    t.chunk_begun = true;
  }
}

// dK and dV of a chunk of queries, of all heads of the group, become a node.
inline void end_chunk(FlashKeyTile& t, int32_t chunk) {
  if (!t.chunk_begun) return;
  t.chunk_begun = false;
  const FlashProblem& p = *t.task.problem;
  const int32_t node = t.chunks.push(t.task.sequence->q_chunk + chunk, [&](int32_t i) { t.add_node(i); });
  alignas(64) float scale[kFlashTile], one[kFlashTile];
  for (int32_t r = 0; r < kFlashTile; ++r) scale[r] = p.scale, one[r] = 1.0f;
  take_lanes(t.key_sums, scale, t.key_node(node), p.head_dim, t.lanes);
  take_lanes(t.value_sums, one, t.value_node(node), p.value_dim, t.lanes);
}

// Queries [first, last) of one chunk and all heads of the group.
template <class Math>
void add_query_chunk(FlashKeyTiles& all, const FlashTask& task, int32_t first, int32_t last) {
  for (int32_t h = task.head; h < task.head + task.num_heads; ++h) {
    for (int32_t from = first; from < last; from += kFlashTile) {
      add_key_gradients<Math>(all, h, from, from + kFlashTile < last ? from + kFlashTile : last);
    }
  }
  for (int32_t i = 0; i < all.count; ++i) end_chunk(all.tiles[i], first / kFlashChunk);
}

template <class Math>
void flash_backward_keys(const FlashTask& task) {
  const FlashProblem& p = *task.problem;
  const FlashSequence& s = *task.sequence;
  FlashKeyTiles all(task);
  const auto row_of = [&](const FlashKeyTile& t) {
    return [&t](int32_t r) { return RowHead{t.task.first + r, t.task.kv_head}; };
  };
  FlashRange seeing{INT32_MAX, 0};
  for (int32_t i = 0; i < all.count; ++i) {
    FlashKeyTile& t = all.tiles[i];
    Math::load_lanes(s.k, t.task.count, p.head_dim, all.query, t.keys, row_of(t));
    Math::load_lanes(s.v, t.task.count, p.value_dim, all.d_out, t.values, row_of(t));
    zero_lanes(t.key_sums, p.head_dim);
    zero_lanes(t.value_sums, p.value_dim);
    if (t.seeing.first >= t.seeing.last) continue;
    seeing.first = t.seeing.first < seeing.first ? t.seeing.first : seeing.first;
    seeing.last = t.seeing.last > seeing.last ? t.seeing.last : seeing.last;
  }
  int32_t first = seeing.first / kFlashTile * kFlashTile;
  while (first < seeing.last) {
    const int32_t end = (first / kFlashChunk + 1) * kFlashChunk, last = end < s.q_len ? end : s.q_len;
    add_query_chunk<Math>(all, task, first, last);
    first = last;
  }
  float one[kFlashTile];
  for (float& f : one) f = 1.0f;
  for (int32_t i = 0; i < all.count; ++i) {
    FlashKeyTile& t = all.tiles[i];
    if (t.chunks.depth == 0) {
      zero_lanes(t.key_node(0), p.head_dim);
      zero_lanes(t.value_node(0), p.value_dim);
    }
    t.chunks.finish([&](int32_t n) { t.add_node(n); });
    store_lanes(s.d_k, t.task.count, p.head_dim, t.key_node(0), one, all.query, row_of(t));
    store_lanes(s.d_v, t.task.count, p.value_dim, t.value_node(0), one, all.d_out, row_of(t));
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
