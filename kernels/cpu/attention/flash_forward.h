// Attention over tensors, forward: a tile of up to 64 query rows goes through its keys 64 at a time, with an
// online softmax. Lanes are rows, so that maxima, sums and weights are of vectors and nothing is reduced
// across lanes.
#pragma once

#include <stdint.h>

#include "kernels/cpu/attention/flash_scores.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

struct FlashForwardTile {
  explicit FlashForwardTile(const FlashTask& of)
      : task(of), ranges(of), lanes(whole_lanes(of.count)), scratch(of) {
    const FlashProblem& p = *task.problem;
    query = scratch.take_tile(p.head_dim);
    keys = scratch.take_tile(p.head_dim);
    values = scratch.take_tile(p.value_dim);
    acc = scratch.take_tile(p.value_dim);
    scores = scratch.take(kFlashTile * kFlashTile);
  }
  const FlashTask& task;
  const LaneRanges ranges;
  const int32_t lanes;  // a multiple of 16
  FlashScratch scratch;
  float* query;   // [head_dim][64]
  float* keys;    // [64][head_dim]
  float* values;  // [64][value_dim]
  float* acc;     // [value_dim][64]
  float* scores;  // [64 keys][64], then weights
  alignas(64) float row_max[kFlashTile];
  alignas(64) float row_sum[kFlashTile];
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
void attend_tile(FlashForwardTile& t, int32_t from, int32_t to) {
  const FlashProblem& p = *t.task.problem;
  const FlashSequence& s = *t.task.sequence;
  const int32_t count = to - from, head = t.task.kv_head;
  Math::load_rows(s.k, from, count, head, p.head_dim, t.keys);
  Math::scores(t.keys, count, p.head_dim, t.query, t.lanes, t.scores,
               next_rows(s.v, from, to, head, p.value_dim));
  const bool whole = t.ranges.whole(from, to);
  for (int32_t lane = 0; lane < t.lanes; lane += kLanes) {
    whole ? softmax_lanes<false>(t, lane, from, count) : softmax_lanes<true>(t, lane, from, count);
  }
  Math::load_rows(s.v, from, count, head, p.value_dim, t.values);
  Math::accumulate(t.values, count, p.value_dim, t.scores, t.lanes, t.acc,
                   next_rows(s.k, to, t.ranges.any_last, head, p.head_dim));
}

inline void end_rows(FlashForwardTile& t) {
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
  store_lanes(s.out, t.task.count, t.task.problem->value_dim, t.acc, factor, t.values, row_of);
}

template <class Math>
void flash_forward(const FlashTask& task) {
  FlashForwardTile t(task);
  Math::load_lanes(task.sequence->q, task.count, task.problem->head_dim, t.keys, t.query, RowOfTask{task});
  begin_rows(t);
  for_each_key_tile(task, t.ranges, [&](int32_t from, int32_t to) { attend_tile<Math>(t, from, to); });
  end_rows(t);
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
