// Attention over tensors, backward, in two passes that recompute the scores, so that every sum has one order
// and one thread:
//
//     P  = exp(S - lse)      dP = d_out V^T      dS = P * (dP - delta) * (1 - (S / softcap)^2)
//     pass over queries      dQ = scale dS K                      lanes are query rows, keys are broadcast
//     pass over keys         dV = P^T d_out,  dK = scale dS^T Q   lanes are keys, query rows are broadcast
//
// delta[row] = sum over dimensions of d_out * out. Seven products instead of five, and no atomic addition.
#pragma once

#include <stdint.h>

#include "kernels/cpu/attention/flash_scores.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

inline void zero_lanes(float* sums, int32_t dims) {
  for (int64_t i = 0; i < int64_t{dims} * kFlashTile; i += kLanes) Simd::store(sums + i, Simd::zero());
}

// delta of a tile of query rows.
void flash_delta(const FlashTask& task) {
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
    const V16 share = Simd::div(score, Simd::broadcast(p.softcap)), one = Simd::broadcast(1.0f);
    slope = Simd::mul(slope, Simd::sub(one, Simd::mul(share, share)));
  }
  const V16 weight = exp16(Simd::sub(mask(score), lse));
  return {weight, Simd::mul(weight, slope)};
}

// ---------------------------------------------------------------- dQ: lanes are query rows

struct FlashQueryTile {
  explicit FlashQueryTile(const FlashTask& of)
      : task(of), ranges(of), lanes(whole_lanes(of.count)), scratch(of) {
    const FlashProblem& p = *task.problem;
    query = scratch.take_tile(p.head_dim);
    keys = scratch.take_tile(p.head_dim);
    sums = scratch.take_tile(p.head_dim);
    d_out = scratch.take_tile(p.value_dim);
    values = scratch.take_tile(p.value_dim);
    scores = scratch.take(kFlashTile * kFlashTile);
    d_weights = scratch.take(kFlashTile * kFlashTile);
  }
  const FlashTask& task;
  const LaneRanges ranges;
  const int32_t lanes;
  FlashScratch scratch;
  float *query, *keys, *sums;  // [head_dim][64], [64][head_dim], [head_dim][64]
  float *d_out, *values;       // [value_dim][64], [64][value_dim]
  float *scores, *d_weights;   // [64 keys][64]; scores become dS
  alignas(64) float lse[kFlashTile];
  alignas(64) float delta[kFlashTile];
};

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
void add_query_gradient(FlashQueryTile& t, int32_t from, int32_t to) {
  const FlashProblem& p = *t.task.problem;
  const FlashSequence& s = *t.task.sequence;
  const int32_t count = to - from, head = t.task.kv_head;
  Math::load_rows(s.k, from, count, head, p.head_dim, t.keys);
  Math::load_rows(s.v, from, count, head, p.value_dim, t.values);
  Math::scores(t.keys, count, p.head_dim, t.query, t.lanes, t.scores,
               next_rows(s.k, to, t.ranges.any_last, head, p.head_dim));
  Math::scores(t.values, count, p.value_dim, t.d_out, t.lanes, t.d_weights,
               next_rows(s.v, to, t.ranges.any_last, head, p.value_dim));
  const bool whole = t.ranges.whole(from, to);
  for (int32_t lane = 0; lane < t.lanes; lane += kLanes) {
    whole ? gradient_lanes<false>(t, lane, from, count) : gradient_lanes<true>(t, lane, from, count);
  }
  Math::accumulate(t.keys, count, p.head_dim, t.scores, t.lanes, t.sums, {});
}

template <class Math>
void flash_backward_queries(const FlashTask& task) {
  const FlashProblem& p = *task.problem;
  const FlashSequence& s = *task.sequence;
  const RowOfTask row_of{task};
  FlashQueryTile t(task);
  Math::load_lanes(s.q, task.count, p.head_dim, t.keys, t.query, row_of);
  Math::load_lanes(s.d_out, task.count, p.value_dim, t.values, t.d_out, row_of);
  for (int32_t r = 0; r < t.lanes; ++r) {
    const RowHead at = row_of(r < task.count ? r : 0);
    t.lse[r] = finite_lse(s, at);
    t.delta[r] = s.delta[at.head * s.row_stride + at.row];
  }
  zero_lanes(t.sums, p.head_dim);
  for_each_key_tile(task, t.ranges, [&](int32_t from, int32_t to) { add_query_gradient<Math>(t, from, to); });
  float factor[kFlashTile];
  for (float& f : factor) f = p.scale;
  store_lanes(s.d_q, task.count, p.head_dim, t.sums, factor, t.keys, row_of);
}

// ---------------------------------------------------------------- dK, dV: lanes are keys

struct FlashKeyTile {
  explicit FlashKeyTile(const FlashTask& of) : task(of), lanes(whole_lanes(of.count)), scratch(of) {
    const FlashProblem& p = *task.problem;
    keys = scratch.take_tile(p.head_dim);
    query = scratch.take_tile(p.head_dim);
    key_sums = scratch.take_tile(p.head_dim);
    values = scratch.take_tile(p.value_dim);
    d_out = scratch.take_tile(p.value_dim);
    value_sums = scratch.take_tile(p.value_dim);
    scores = scratch.take(kFlashTile * kFlashTile);
    d_weights = scratch.take(kFlashTile * kFlashTile);
  }
  const FlashTask& task;
  const int32_t lanes;
  FlashScratch scratch;
  float *keys, *query, *key_sums;      // [head_dim][64], [64][head_dim], [head_dim][64]
  float *values, *d_out, *value_sums;  // [value_dim][64], [64][value_dim], [value_dim][64]
  float *scores, *d_weights;           // [64 queries][64]; become weights and dS
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

template <class Math>
void add_key_gradient(FlashKeyTile& t, int32_t head, int32_t from, int32_t to) {
  const FlashProblem& p = *t.task.problem;
  const FlashSequence& s = *t.task.sequence;
  const int32_t count = to - from;
  Math::load_rows(s.q, from, count, head, p.head_dim, t.query);
  Math::load_rows(s.d_out, from, count, head, p.value_dim, t.d_out);
  Math::scores(t.query, count, p.head_dim, t.keys, t.lanes, t.scores, {});
  Math::scores(t.d_out, count, p.value_dim, t.values, t.lanes, t.d_weights, {});
  for (int32_t m = 0; m < count; ++m) gradient_row(t, m, from + m, head);
  Math::accumulate(t.d_out, count, p.value_dim, t.scores, t.lanes, t.value_sums,
                   next_rows(s.q, to, s.q_len, head, p.head_dim));
  Math::accumulate(t.query, count, p.head_dim, t.d_weights, t.lanes, t.key_sums,
                   next_rows(s.d_out, to, s.q_len, head, p.value_dim));
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

template <class Math>
void flash_backward_keys(const FlashTask& task) {
  const FlashProblem& p = *task.problem;
  const FlashSequence& s = *task.sequence;
  const auto row_of = [&](int32_t r) { return RowHead{task.first + r, task.kv_head}; };
  FlashKeyTile t(task);
  Math::load_lanes(s.k, task.count, p.head_dim, t.query, t.keys, row_of);
  Math::load_lanes(s.v, task.count, p.value_dim, t.d_out, t.values, row_of);
  zero_lanes(t.key_sums, p.head_dim);
  zero_lanes(t.value_sums, p.value_dim);
  const FlashRange seeing = seeing_queries(p, s, task.first, task.first + task.count);
  for (int32_t h = task.head; h < task.head + task.num_heads; ++h) {
    for (int32_t from = seeing.first / kFlashTile * kFlashTile; from < seeing.last; from += kFlashTile) {
      const int32_t to = from + kFlashTile < s.q_len ? from + kFlashTile : s.q_len;
      if (has_block(task, h, from)) add_key_gradient<Math>(t, h, from, to);
    }
  }
  float factor[kFlashTile];
  for (float& f : factor) f = p.scale;
  store_lanes(s.d_k, task.count, p.head_dim, t.key_sums, factor, t.query, row_of);
  for (float& f : factor) f = 1.0f;
  store_lanes(s.d_v, task.count, p.value_dim, t.value_sums, factor, t.d_out, row_of);
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
