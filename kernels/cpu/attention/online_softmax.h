// Online softmax of one row and one tile: the numbers that every table has, whatever computes the scores.
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/exp.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/tanh.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// What a row has summed up so far, lane sums behind its scores and values, times exp(by).
[[gnu::noinline]] inline void rescale(const AttentionSplit& s, int row, float by) {
  float keep[kLanes];
  Simd::store(keep, exp16_below(Simd::broadcast(by)));
  const V16 factor = Simd::broadcast(keep[0]);
  float* sums = s.scores + row * static_cast<int64_t>(kTileTokens + kLanes) + kTileTokens;
  Simd::store(sums, Simd::mul(Simd::load(sums), factor));
  float* acc_row = s.acc + row * static_cast<int64_t>(s.padded_dim);
  for (int32_t c = 0; c < s.padded_dim; c += kLanes) {
    Simd::store(acc_row + c, Simd::mul(Simd::load(acc_row + c), factor));
  }
}

// Scores of one row to weights exp(score - largest); the row's earlier sums are rescaled to the new largest.
// [from, to) are the row's tokens in this tile; the lane sums lie behind the row's scores.
template <class Exp = FullExp>
void softmax_row(const AttentionSplit& s, int row, int32_t from, int32_t to) {
  float* scores = s.scores + row * static_cast<int64_t>(kTileTokens + kLanes);
  const float never = -__builtin_inff();
  const int32_t first = from / kLanes * kLanes, last = (to + kLanes - 1) / kLanes * kLanes;
  if (s.softcap > 0.0f) {
    for (int32_t t = first; t < last; t += kLanes)
      Simd::store(scores + t, softcap16(Simd::load(scores + t), s.softcap));
  }
  for (int32_t t = first; t < from; ++t) scores[t] = never;
  for (int32_t t = to; t < last; ++t) scores[t] = never;
  V16 lane_max = Simd::load(scores + first);
  for (int32_t t = first + kLanes; t < last; t += kLanes)
    lane_max = Simd::max(lane_max, Simd::load(scores + t));
  const float tile_max = Simd::reduce_max(lane_max);
  const float row_max = s.row_max[row] > tile_max ? s.row_max[row] : tile_max;
  float* lane_sums = scores + kTileTokens;
  // Mostly the largest is an old one, and everything would be multiplied by exactly one.
  if (!(s.row_max[row] == row_max && row_max > never)) rescale(s, row, s.row_max[row] - row_max);
  V16 sums = Simd::load(lane_sums);
  for (int32_t t = first; t < last; t += kLanes) {
    const V16 weight = exp16_below<Exp>(Simd::sub(Simd::load(scores + t), Simd::broadcast(row_max)));
    Simd::store(scores + t, weight);
    sums = Simd::add(sums, weight);
  }
  Simd::store(lane_sums, sums);
  s.row_max[row] = row_max;
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
