// Eight query rows that share keys and values: the eight heads of a KV head of gpt-oss. A block is taken
// eight tokens (or eight dimensions of the values) at a time, so that 8 x 8 sums fill sixteen registers, and
// rows bring their factors four to a register: fused multiply-adds by a lane need no broadcast. Roofline: per
// token and KV head of 64 dimensions 256 fused multiply-adds, 32 loads and 32 conversions for 256 bytes of
// BF16: the vector units, 128 cycles on two of them.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "kernels/cpu/attention/paged_float.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/neon.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

struct V8 {
  float32x4_t lo, hi;
};

inline V8 load8(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline V8 load8(LoadF32, const float* p) { return load8(p); }
inline V8 load8(LoadF16, const uint16_t* p) {
  const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
  return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}
inline V8 load8(LoadBF16, const uint16_t* p) {
  // Zipping zeros below is what shifting left by 16 does, and runs on both vector units of Neoverse-N1.
  const uint16x8_t bits = vld1q_u16(p), zero = vdupq_n_u16(0);
  return {vreinterpretq_f32_u16(vzip1q_u16(zero, bits)), vreinterpretq_f32_u16(vzip2q_u16(zero, bits))};
}

template <class Load>
inline constexpr int kSharedRows<KvFloat<Load>> = 8;
template <class Load>
inline constexpr bool kLoopsPrefetch<KvFloat<Load>> = true;

template <class Load>
struct SharedRows<KvFloat<Load>, 8> {
  using Stored = typename Load::Stored;

  [[gnu::always_inline]] static void add(float32x4_t (&acc)[8][2], V8 x, const float32x4_t (&by)[8],
                                         auto lane) {
    constexpr int kLane = decltype(lane){};  // a constant where nothing is inlined too
    unroll<8>([&](auto r) {
      acc[r][0] = vfmaq_laneq_f32(acc[r][0], x.lo, by[r], kLane);
      acc[r][1] = vfmaq_laneq_f32(acc[r][1], x.hi, by[r], kLane);
    });
  }

  // The next tile's lines are prefetched by the loops of the first eight rows, one with every four dimensions
  // or tokens: of keys as many as there are steps over a block, and of values.
  static constexpr int32_t kPrefetchBytes = 64 * static_cast<int32_t>(sizeof(Stored)) / 2;
  [[gnu::always_inline]] static void prefetch(const uint8_t* at) {
    for (int32_t line = 0; line < kPrefetchBytes; line += 64) __builtin_prefetch(at + line, 0, 3);
    asm volatile("");  // g++ takes a function that only prefetches for one that does nothing
  }

  static void score_tile(const AttentionSplit& s, const Tile& tile, int row, float* scores, int64_t stride) {
    for (int32_t b = tile.lo; b < tile.hi; ++b) {
      const uint8_t *keys = tile.block[b] + s.key_offset, *next = tile.next[b] + s.key_offset;
      if (row == 0) {
        score_block<true>(s, row, keys, next, scores + b * kLanes, stride);
      } else {
        score_block<false>(s, row, keys, next, scores + b * kLanes, stride);
      }
    }
  }
  template <bool kPrefetch>
  static void score_block(const AttentionSplit& s, int row, const uint8_t* keys, const uint8_t* next,
                          float* scores, int64_t stride) {
    for (int half = 0; half < kLanes; half += 8) {
      const Stored* k = reinterpret_cast<const Stored*>(keys) + half;
      float32x4_t acc[8][2];
      unroll<8>([&](auto r) { acc[r][0] = acc[r][1] = vdupq_n_f32(0.0f); });
      int32_t d = 0;
      for (; d + 4 <= s.head_dim; d += 4) {
        if constexpr (kPrefetch) {
          prefetch(next);
          next += kPrefetchBytes;
        }
        float32x4_t q[8];
        unroll<8>([&](auto r) { q[r] = vld1q_f32(s.query[row + r] + d); });
        unroll<4>([&](auto i) { add(acc, load8(Load{}, k + (d + i) * kLanes), q, i); });
      }
      for (; d < s.head_dim; ++d) {
        float32x4_t q[8];
        unroll<8>([&](auto r) { q[r] = vdupq_n_f32(s.query[row + r][d]); });
        add(acc, load8(Load{}, k + d * kLanes), q, Index<0>{});
      }
      unroll<8>([&](auto r) {
        float* to = scores + r * stride + half;
        vst1q_f32(to, vmulq_n_f32(acc[r][0], s.scale));
        vst1q_f32(to + 4, vmulq_n_f32(acc[r][1], s.scale));
      });
    }
  }

  static void add_values(const AttentionSplit& s, const Tile& tile, int row, int32_t from, int32_t to) {
    const int64_t stride = kTileTokens + kLanes, dim = s.head_dim, padded = s.padded_dim;
    const float* weights = s.scores + row * stride;
    const auto value = [&](int32_t t, int32_t c) {
      const auto* v = reinterpret_cast<const Stored*>(tile.block[t / kLanes] + s.value_offset);
      return load8(Load{}, v + (t % kLanes) * dim + c);
    };
    for (int32_t c = 0; c < s.padded_dim; c += 8) {
      float32x4_t acc[8][2];
      float* acc_row = s.acc + row * padded + c;
      unroll<8>([&](auto r) {
        const V8 v = load8(acc_row + r * padded);
        acc[r][0] = v.lo;
        acc[r][1] = v.hi;
      });
      int32_t t = from;
      for (; t < to && (t % 4 != 0 || t + 4 > to); ++t) {  // up to four that lie together
        float32x4_t p[8];
        unroll<8>([&](auto r) { p[r] = vdupq_n_f32(weights[r * stride + t]); });
        add(acc, value(t, c), p, Index<0>{});
      }
      for (; t + 4 <= to; t += 4) {  // of one block
        const auto block = static_cast<uint32_t>(t) / kLanes, first = static_cast<uint32_t>(t) % kLanes;
        if (row == 0) {
          const uint32_t step = static_cast<uint32_t>(c) / 8 * (kLanes / 4) + first / 4;
          prefetch(tile.next[block] + s.value_offset + step * kPrefetchBytes);
        }
        const auto* v = reinterpret_cast<const Stored*>(tile.block[block] + s.value_offset) + first * dim + c;
        float32x4_t p[8];
        unroll<8>([&](auto r) { p[r] = vld1q_f32(weights + r * stride + t); });
        unroll<4>([&](auto i) { add(acc, load8(Load{}, v + i * dim), p, i); });
      }
      for (; t < to; ++t) {
        float32x4_t p[8];
        unroll<8>([&](auto r) { p[r] = vdupq_n_f32(weights[r * stride + t]); });
        add(acc, value(t, c), p, Index<0>{});
      }
      unroll<8>([&](auto r) {
        vst1q_f32(acc_row + r * padded, acc[r][0]);
        vst1q_f32(acc_row + r * padded + 4, acc[r][1]);
      });
    }
  }
};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
