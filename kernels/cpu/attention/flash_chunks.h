// The order in which chunks of keys (or of queries, for dK and dV) are put together: a binary tree over their
// absolute numbers. A node stands for the chunks [i 2^l, (i + 1) 2^l), and is its two halves merged, the
// lower first; a half of which nothing is seen is left out. So a span of chunks is a few nodes, whoever
// computed them and whenever:
//
//     chunks      0   1   2   3   4   5   6                   seen: 1 to 6
//                     |   \---/   \---/   |
//                     \----/       \-----/
//                        \-----------/
//
// Within a chunk a row goes through its tiles of 64 in order. What merging is: flash_merge_lanes for partial
// softmaxes (output and log-sum-exp), a plain addition for partial gradients.
#pragma once

#include <stdint.h>

#include "kernels/cpu/attention/flash_rows.h"
#include "kernels/cpu/attention/flash_task.h"
#include "kernels/cpu/simd/exp.h"
#include "kernels/cpu/simd/simd.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// The level at which two chunks are under one node.
inline int32_t common_level(int32_t a, int32_t b) {
  return 32 - __builtin_clz(static_cast<uint32_t>(a) ^ static_cast<uint32_t>(b));
}

// Nodes that wait for their other half, while chunks come in ascending order; node i is in the caller's slot
// i. Between neighbours the levels at which they meet descend.
struct ChunkStack {
  static constexpr int32_t kMost = 34;  // levels of 32 bits, and two

  // Where the node of `chunk` goes. merge(i): node i + 1 into node i.
  template <class Merge>
  int32_t push(int32_t chunk, const Merge& merge) {
    while (depth > 1 && common_level(at[depth - 2], at[depth - 1]) < common_level(at[depth - 1], chunk)) {
      merge(--depth - 1);
    }
    at[depth] = chunk;
    return depth++;
  }
  // All into node 0.
  template <class Merge>
  void finish(const Merge& merge) {
    while (depth > 1) merge(--depth - 1);
  }
  int32_t depth = 0;
  int32_t at[kMost];  // a chunk of each
};

// Two partial softmaxes of sixteen rows: a = merged, out = out_a * weight_a + out_b * weight_b. One that has
// seen nothing (-infinity) leaves the other as it is, to the bit.
struct MergeWeights {
  alignas(64) float a[kLanes], b[kLanes], lse[kLanes];
};
[[gnu::always_inline]] inline void merge_weights(const float* lse_a, const float* lse_b, MergeWeights& to) {
  const V16 a = Simd::load(lse_a), b = Simd::load(lse_b), largest = Simd::max(a, b);
  const V16 top = Simd::select_less(largest, Simd::broadcast(-3e38f), Simd::zero(), largest);
  const V16 of_a = exp16_below(Simd::sub(a, top)), of_b = exp16_below(Simd::sub(b, top));
  const V16 sum = Simd::add(of_a, of_b), one = Simd::broadcast(1.0f);
  const V16 by = Simd::select_less(sum, one, one, sum);  // at least one, or both have seen nothing
  Simd::store(to.a, Simd::div(of_a, by));
  Simd::store(to.b, Simd::div(of_b, by));
  alignas(64) float sums[kLanes];
  Simd::store(sums, sum);
  Simd::store(to.lse, largest);
  for (int32_t i = 0; i < kLanes; ++i) {  // in double: the C library's float variants need not agree
    if (sums[i] > 1.0f) to.lse[i] = static_cast<float>(to.lse[i] + __builtin_log(sums[i]));
  }
}

// a = a and b merged: outputs [dims][64] and log-sum-exps [64] of `lanes` rows.
inline void flash_merge_lanes(float* out_a, float* lse_a, const float* out_b, const float* lse_b,
                              int32_t dims, int32_t lanes) {
  for (int32_t lane = 0; lane < lanes; lane += kLanes) {
    MergeWeights w;
    merge_weights(lse_a + lane, lse_b + lane, w);
    const V16 of_a = Simd::load(w.a), of_b = Simd::load(w.b);
    for (int32_t d = 0; d < dims; ++d) {
      float* const at = out_a + d * kFlashTile + lane;
      const V16 b = Simd::mul(of_b, Simd::load(out_b + d * kFlashTile + lane));
      Simd::store(at, Simd::fma(of_a, Simd::load(at), b));
    }
    Simd::store(lse_a + lane, Simd::load(w.lse));
  }
}

// a += b: [dims][64].
inline void flash_add_lanes(float* a, const float* b, int32_t dims, int32_t lanes) {
  for (int32_t d = 0; d < dims; ++d) {
    for (int32_t lane = 0; lane < lanes; lane += kLanes) {
      float* const at = a + d * kFlashTile + lane;
      Simd::store(at, Simd::add(Simd::load(at), Simd::load(b + d * kFlashTile + lane)));
    }
  }
}

// to = from * factor of each lane; and `from` is zero again.
inline void take_lanes(float* from, const float* factor, float* to, int32_t dims, int32_t lanes) {
  for (int32_t d = 0; d < dims; ++d) {
    for (int32_t lane = 0; lane < lanes; lane += kLanes) {
      float* const at = from + d * kFlashTile + lane;
      Simd::store(to + d * kFlashTile + lane, Simd::mul(Simd::load(at), Simd::load(factor + lane)));
      Simd::store(at, Simd::zero());
    }
  }
}

// The same in memory, as rows [dims] a head: what mr_flash_merge does for rows [first, first + count) of one
// head, up to 16 of them. lse_a absent: gradients, which are added.
inline void flash_merge_rows(const FlashMergeTask& t) {
  MergeWeights w;
  if (t.lse_a != nullptr) {
    alignas(64) float a[kLanes], b[kLanes];
    for (int32_t i = 0; i < kLanes; ++i) {
      a[i] = i < t.count ? t.lse_a[i] : 0.0f;
      b[i] = i < t.count ? t.lse_b[i] : 0.0f;
    }
    merge_weights(a, b, w);
    for (int32_t i = 0; i < t.count; ++i) t.lse_a[i] = w.lse[i];
  }
  for (int32_t i = 0; i < t.count; ++i) {
    float* const a = t.out_a + i * t.row_stride;
    const float* const b = t.out_b + i * t.row_stride;
    if (t.lse_a == nullptr) {
      for (int32_t d = 0; d < t.dims; ++d) a[d] = a[d] + b[d];
    } else {
      const float of_a = w.a[i], of_b = w.b[i];
      for (int32_t d = 0; d < t.dims; ++d) a[d] = __builtin_fmaf(of_a, a[d], of_b * b[d]);
    }
  }
}

// What a row with a sink is multiplied by, and its log-sum-exp: the sink is a key with that score and no
// value, merged last. Sixteen rows; a sink of -infinity is none.
[[gnu::always_inline]] inline void merge_sinks(float* lse, const float* sinks, float* factor) {
  MergeWeights w;
  merge_weights(lse, sinks, w);
  Simd::store(factor, Simd::load(w.a));
  Simd::store(lse, Simd::load(w.lse));
}

// A finished row of a partial, as mr_flash_finish writes it: up to 16 rows of one head.
inline void flash_finish_rows(const FlashFinishTask& t) {
  alignas(64) float lse[kLanes], sinks[kLanes], factor[kLanes];
  for (int32_t i = 0; i < kLanes; ++i) {
    lse[i] = t.lse_in != nullptr && i < t.count ? t.lse_in[i] : 0.0f;
    sinks[i] = t.sink;
    factor[i] = 1.0f;
  }
  if (t.has_sink) merge_sinks(lse, sinks, factor);
  float staging[256];  // the most dimensions of a head
  for (int32_t i = 0; i < t.count; ++i) {
    const float* const from = t.partial + i * t.partial_stride;
    for (int32_t d = 0; d < t.dims; ++d) staging[d] = from[d] * factor[i] + 0.0f;
    store_row(t.out, t.first + i, t.head, t.dims, staging);
    if (t.lse != nullptr) t.lse[i] = lse[i];
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
