// Scores and weighted values over a cache of floats (F32, F16, BF16, FP8): what some query rows of a KV head
// share, loads of keys and of values.
#pragma once

#include <stdint.h>

#include "kernels/cpu/attention/kv_tiles.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// How a cache is read: key() gives dimension d of a block's 16 tokens, value() dimensions [c, c + 16) of one.
template <class Load>
struct KvFloat {
  static constexpr bool kIntegers = false;
  using Stored = typename Load::Stored;
  static V16 key(const uint8_t* head, int32_t, int32_t d) {
    return Load::load(reinterpret_cast<const Stored*>(head) + d * kLanes);
  }
  static V16 value(const uint8_t* head, int32_t dim, int32_t token, int32_t c) {
    return Load::load(reinterpret_cast<const Stored*>(head) + token * static_cast<int64_t>(dim) + c);
  }
};

// 16 bytes to floats by way of memory, for a Simd that has no better way.
template <class S, class Convert>
V16 widen16(const uint8_t* p, Convert convert) {
  float floats[kLanes];
  for (int i = 0; i < kLanes; ++i) floats[i] = convert(p[i]);
  return S::load(floats);
}
template <class S>
V16 load_e4m3(const uint8_t* p) {
  if constexpr (requires { S::widen_e4m3(p); }) {
    return S::widen_e4m3(p);
  } else {
    return widen16<S>(p, [](uint8_t x) {
      const uint32_t magnitude = x & 0x7fu, sign = (x & 0x80u) << 24;
      // Seen as the exponent and fraction of a float, e4m3 is too small by 2^120.
      uint32_t bits = magnitude == 0x7fu ? 0x7fc00000u : magnitude << 20;
      float value;
      __builtin_memcpy(&value, &bits, 4);
      value *= 0x1p120f;
      __builtin_memcpy(&bits, &value, 4);
      bits |= sign;
      __builtin_memcpy(&value, &bits, 4);
      return value;
    });
  }
}

struct KvFp8 {  // e8m0 scales [16], then the codes
  static constexpr bool kIntegers = false;
  static float scale(uint8_t bits) {
    const uint32_t float_bits = static_cast<uint32_t>(bits) << 23;
    float value;
    __builtin_memcpy(&value, &float_bits, 4);
    return value;
  }
  static V16 key(const uint8_t* head, int32_t, int32_t d) {
    return Simd::mul(load_e4m3<Simd>(head + kLanes + d * kLanes), widen16<Simd>(head, scale));
  }
  static V16 value(const uint8_t* head, int32_t dim, int32_t token, int32_t c) {
    return Simd::mul(load_e4m3<Simd>(head + kLanes + token * static_cast<int64_t>(dim) + c),
                     Simd::broadcast(scale(head[token])));
  }
};

// What kR rows share: loads of keys and of values. kUnroll blocks, or sixteens of dimensions, are taken at
// once where there are registers for it: a row's factor is then loaded once for all of them.
template <class Kv, int kR>
struct SharedRows {
  // scores[r][t] = q_r . k_t over kUnroll blocks, t < 16 each; keys are [head_dim][16].
  template <int kUnroll>
  static void score_blocks(const AttentionSplit& s, int row, const Tile& tile, int32_t b, float* scores,
                           int64_t stride) {
    [[maybe_unused]] const int64_t bytes = s.head_bytes / s.head_dim;  // of a dimension of sixteen keys
    V16 acc[kUnroll][kR];
    unroll<kUnroll>([&](auto w) { unroll<kR>([&](auto r) { acc[w][r] = Simd::zero(); }); });
    const uint8_t *keys[kUnroll], *next[kUnroll], *far[kUnroll];
    unroll<kUnroll>([&](auto w) {
      keys[w] = tile.block[b + w] + s.key_offset;
      next[w] = tile.next[b + w] + s.key_offset;
      far[w] = tile.far[b + w] + s.key_offset;
    });
    for (int32_t d = 0; d < s.head_dim; ++d) {
      V16 key[kUnroll];
      if constexpr (kAtOnce > 1) {
        // From memory to the second-level cache a tile before it goes on to the first: that level has too few
        // line buffers for a core's share of the bandwidth. Two dimensions of BF16 are a line.
        for (int w = 0; w < kUnroll; ++w) {
          if (d % 2 == 0 || bytes > 32) __builtin_prefetch(next[w] + d * bytes, 0, 3);
          if (d % 2 != 0 || bytes > 32) __builtin_prefetch(far[w] + d * bytes, 0, 2);
        }
      }
      unroll<kUnroll>([&](auto w) { key[w] = Kv::key(keys[w], s.head_dim, d); });
      unroll<kR>([&](auto r) {
        const V16 q = Simd::broadcast(s.query[row + r][d]);
        unroll<kUnroll>([&](auto w) { acc[w][r] = Simd::fma(key[w], q, acc[w][r]); });
      });
    }
    const V16 scale = Simd::broadcast(s.scale);
    unroll<kUnroll>([&](auto w) {
      unroll<kR>([&](auto r) { Simd::store(scores + r * stride + w * kLanes, Simd::mul(acc[w][r], scale)); });
    });
  }

  // acc[r][c..c+16 kUnroll) += sum over tokens [from, to) of the tile, in order, of weight * v.
  template <int kUnroll>
  static void add_dims(const AttentionSplit& s, const Tile& tile, int row, int32_t from, int32_t to,
                       int32_t c) {
    const int64_t stride = kTileTokens + kLanes, dim = s.padded_dim;
    // A token's values, and where these dimensions begin in the next tile.
    [[maybe_unused]] const int64_t bytes = s.head_bytes / kLanes, next = s.value_offset + c * bytes / dim;
    const float* weights = s.scores + row * stride;
    V16 acc[kUnroll][kR];
    float* acc_row = s.acc + row * dim + c;
    unroll<kUnroll>(
        [&](auto w) { unroll<kR>([&](auto r) { acc[w][r] = Simd::load(acc_row + r * dim + w * kLanes); }); });
    for (int32_t t = from; t < to; ++t) {
      const uint8_t* head = tile.block[t / kLanes] + s.value_offset;
      if constexpr (kAtOnce > 1) {
        __builtin_prefetch(tile.next[t / kLanes] + next + t % kLanes * bytes, 0, 3);
        __builtin_prefetch(tile.far[t / kLanes] + next + t % kLanes * bytes, 0, 2);
      }
      V16 value[kUnroll];
      unroll<kUnroll>([&](auto w) { value[w] = Kv::value(head, s.head_dim, t % kLanes, c + w * kLanes); });
      unroll<kR>([&](auto r) {
        const V16 weight = Simd::broadcast(weights[r * stride + t]);
        unroll<kUnroll>([&](auto w) { acc[w][r] = Simd::fma(value[w], weight, acc[w][r]); });
      });
    }
    unroll<kUnroll>(
        [&](auto w) { unroll<kR>([&](auto r) { Simd::store(acc_row + r * dim + w * kLanes, acc[w][r]); }); });
  }

  static void score_tile(const AttentionSplit& s, const Tile& tile, int row, float* scores, int64_t stride) {
    int32_t b = tile.lo;
    if constexpr (kAtOnce > 1) {
      for (; b + kAtOnce <= tile.hi; b += kAtOnce) {
        score_blocks<kAtOnce>(s, row, tile, b, scores + b * kLanes, stride);
      }
    }
    for (; b < tile.hi; ++b) score_blocks<1>(s, row, tile, b, scores + b * kLanes, stride);
  }
  static void add_values(const AttentionSplit& s, const Tile& tile, int row, int32_t from, int32_t to) {
    int32_t c = 0;
    if constexpr (kAtOnce > 1) {
      for (; c + kAtOnce * kLanes <= s.padded_dim; c += kAtOnce * kLanes) {
        add_dims<kAtOnce>(s, tile, row, from, to, c);
      }
    }
    for (; c < s.padded_dim; c += kLanes) add_dims<1>(s, tile, row, from, to, c);
  }
};

// How many rows share loads: sixteen registers of sums where registers hold four floats.
template <class Kv>
inline constexpr int kSharedRows = Simd::kAttendRows;
// Whether loops over so many rows prefetch the next tile's lines, a few with every step.
template <class Kv>
inline constexpr bool kLoopsPrefetch = kAtOnce > 1;

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
