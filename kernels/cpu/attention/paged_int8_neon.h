// Eight query rows over an int8 cache with the dot product instruction (paged_int8.h): four tokens' two sums
// of 32 dimensions, or eight dimensions of values, by eight rows are sixteen registers of sums, and a row's
// codes come sixteen to a register, of which an instruction takes four by lane. Roofline: per token and KV
// head of 64 dimensions 136 bytes, 64 dot products, 44 vector operations for softmax and the weights' codes
// and some 16 for scales and stores, which take a vector unit as well: 62 cycles of two units.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "kernels/cpu/attention/online_softmax.h"
#include "kernels/cpu/attention/paged_float.h"
#include "kernels/cpu/attention/paged_int8.h"
#include "kernels/cpu/simd/exp.h"
#include "kernels/cpu/simd/neon.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"
#if !defined(MILLRACE_HAS_DOTPROD)
#error "for targets with the dot product instruction"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

template <>
inline constexpr int kSharedRows<KvInt8> = 8;
template <>
inline constexpr bool kLoopsPrefetch<KvInt8> = true;

template <>
struct IntegerRows<8> {
  static constexpr int32_t kPrefetchBytes = 128;  // of the next tile, with every sixteen dimensions or tokens
  [[gnu::always_inline]] static void prefetch(const uint8_t* at) {
    for (int32_t line = 0; line < kPrefetchBytes; line += 64) __builtin_prefetch(at + line, 0, 3);
    asm volatile("");  // g++ takes a function that only prefetches for one that does nothing
  }

  // Sums begin with the bits of 1.5 * 2^23 as a float, and so they need not be converted, which is four times
  // the work of a subtraction: 64 products of 127 * 127 are below 2^22.
  alignas(16) static constexpr int32_t kOrigin[4] = {0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};
  static constexpr float kFloatOfOrigin = 12582912.0f;
  // From memory each time: a copy of a register takes a vector unit.
  [[gnu::always_inline]] static float32x4_t from_memory(const void* p) {
    float32x4_t x;
    asm volatile("ldr %q0, %1" : "=w"(x) : "m"(*static_cast<const float32x4_t*>(p)));
    return x;
  }
  [[gnu::always_inline]] static int32x4_t begin() { return vreinterpretq_s32_f32(from_memory(kOrigin)); }
  [[gnu::always_inline]] static void clear(int32x4_t (&sums)[8][2]) {
    unroll<8>([&](auto r) {
      sums[r][0] = begin();
      sums[r][1] = begin();
    });
  }
  static float32x4_t to_float(int32x4_t sum, float32x4_t origin) {
    return vsubq_f32(vreinterpretq_f32_s32(sum), origin);
  }
  static int64_t codes_offset(int32_t dim) {
    return dim / KvInt8::kScaleDims * kLanes * int64_t{sizeof(uint16_t)};
  }
  // Scores from the dimensions of kParts scales, added to what lies there unless they are the first ones.
  // Four tokens by eight rows at a time: all their sums, and what is made of them, stay in registers.
  template <int kParts, bool kFirst>
  static void score_parts(const AttentionSplit& s, const Tile& tile, int row, int32_t first) {
    constexpr int64_t kStride = kTileTokens + kLanes;
    const int8_t* q[8];
    alignas(16) float by[kParts][8];
    unroll<8>([&](auto r) {
      const ActivationBlock* blocks = s.query_blocks[row + r] + first;
      q[r] = blocks->q;
      unroll<kParts>([&](auto p) { by[p][r] = blocks[p].scale * s.scale; });
    });
    const int64_t codes_at = codes_offset(s.head_dim) + first * int64_t{KvInt8::kScaleDims} * kLanes;
    const bool prefetches = row == 0;
    for (int32_t b = tile.lo; b < tile.hi; ++b) {
      const uint8_t *keys = tile.block[b] + s.key_offset, *next = tile.next[b] + s.key_offset;
      float* to = s.scores + row * kStride + b * kLanes;
      if (prefetches && kFirst) __builtin_prefetch(next, 0, 3);
      next += codes_at;
      const int8_t* codes = reinterpret_cast<const int8_t*>(keys + codes_at);
      const uint16_t* scales = KvInt8::scales(keys, first);
      for (int32_t four = 0; four < 4; ++four) {
        if (prefetches) {
          unroll<kParts>([&](auto) {
            prefetch(next);
            next += kPrefetchBytes;
          });
        }
        int32x4_t sums[8][kParts];
        unroll<8>([&](auto r) { unroll<kParts>([&](auto p) { sums[r][p] = begin(); }); });
        unroll<kParts>([&](auto p) {
          unroll<2>([&](auto sixteen) {
            int8x16_t x[8];
            unroll<8>([&](auto r) {
              x[r] = vld1q_s8(q[r] + p * static_cast<int64_t>(sizeof(ActivationBlock)) + sixteen * 16);
            });
            unroll<4>([&](auto lane) {
              constexpr int kLane = decltype(lane){};  // a constant where nothing is inlined too
              const int8x16_t key = vld1q_s8(codes + (p * 8 + sixteen * 4 + lane) * KvInt8::kGroupBytes);
              unroll<8>([&](auto r) { sums[r][p] = vdotq_laneq_s32(sums[r][p], key, x[r], kLane); });
            });
          });
        });
        float32x4_t d[kParts];
        alignas(16) float less[kParts][4];
        unroll<kParts>([&](auto p) {
          d[p] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(scales + p * kLanes)));
          vst1q_f32(less[p], vmulq_n_f32(d[p], -kFloatOfOrigin));
        });
        unroll<8>([&](auto r) {
          constexpr int kLane = decltype(r){} % 4;
          float32x4_t score = vdupq_n_f32(0.0f);
          unroll<kParts>([&](auto p) {
            const float32x4_t part = vfmaq_f32(from_memory(less[p]), vreinterpretq_f32_s32(sums[r][p]), d[p]);
            const float32x4_t factors = vld1q_f32(by[p] + r / 4 * 4);
            if constexpr (p == 0 && kFirst) {
              score = vmulq_laneq_f32(part, factors, kLane);
            } else {
              score = vfmaq_laneq_f32(p == 0 ? vld1q_f32(to + r * kStride) : score, part, factors, kLane);
            }
          });
          vst1q_f32(to + r * kStride, score);
        });
        codes += 4 * KvInt8::kTogether;
        scales += 4;
        to += 4;
      }
    }
  }
  static void score_tile(const AttentionSplit& s, const Tile& tile, int row) {
    const int32_t parts = s.head_dim / KvInt8::kScaleDims;
    if (parts == 1) {
      score_parts<1, true>(s, tile, row, 0);
      return;
    }
    score_parts<2, true>(s, tile, row, 0);
    int32_t part = 2;
    for (; part + 2 <= parts; part += 2) score_parts<2, false>(s, tile, row, part);
    if (part < parts) score_parts<1, false>(s, tile, row, part);
  }

  // What `softmax_row` and `weights_to_codes` do, for eight rows that see a whole tile: the same numbers.
  // Registers go by eights, 32 tokens of a row: a processor that looks 128 instructions ahead would wait for
  // the chain of fewer. Plain arrays, not V16: g++ 12 writes an array of structures to memory with every
  // step.
  static constexpr int32_t kMaxParts = 8, kQuads = kTileTokens / 4;
  using F4 = float32x4_t;
  struct TileWeights {
    F4 scales[kMaxParts][kQuads];
    F4 weights[kMaxParts][8][kQuads];  // times those
    F4 lane_max[kMaxParts][8];
    alignas(16) int8_t codes[kMaxParts][8][kTileTokens];
    alignas(16) float unit[kMaxParts][8];
  };
  static bool softmax_to_codes(const AttentionSplit& s, const Tile& tile, int row, TileWeights& t) {
    const int32_t parts = s.head_dim / KvInt8::kScaleDims;
    for (int32_t part = 0; part < parts; ++part) {
      for (int32_t b = 0; b < kTileTokens / kLanes; ++b) {
        const uint16_t* half = KvInt8::scales(tile.block[b] + s.value_offset, part);
        Simd::store(reinterpret_cast<float*>(t.scales[part] + 4 * b), Simd::load_f16(half));
      }
    }
    alignas(16) float row_max[8];
    const bool near = update_row_max(s, row, row_max);
    for (int r = 0; r < 8; ++r) {
      float* scores = s.scores + (row + r) * static_cast<int64_t>(kTileTokens + kLanes);
      near ? exp_row<true>(scores, row_max[r], parts, r, t) : exp_row<false>(scores, row_max[r], parts, r, t);
    }
    for (int32_t part = 0; part < parts; ++part) codes_of_part(part, t);
    return true;
  }

  // The largest scores so far; earlier sums are rescaled where there is a new one. True where no exponent is
  // so small that its exponential is zero.
  static bool update_row_max(const AttentionSplit& s, int row, float* row_max) {
    bool near = true;
    for (int r = 0; r < 8; r += 4) {
      F4 lane_max[4], lane_min[4];
      unroll<4>([&](auto i) {
        const float* scores = s.scores + (row + r + i) * static_cast<int64_t>(kTileTokens + kLanes);
        lane_max[i] = lane_min[i] = vld1q_f32(scores);
        unroll<kQuads - 1>([&](auto q) {
          const F4 more = vld1q_f32(scores + 4 * (q + 1));
          lane_max[i] = vmaxq_f32(lane_max[i], more);
          lane_min[i] = vminq_f32(lane_min[i], more);
        });
      });
      const F4 tile = vpmaxq_f32(vpmaxq_f32(lane_max[0], lane_max[1]), vpmaxq_f32(lane_max[2], lane_max[3])),
               low = vpminq_f32(vpminq_f32(lane_min[0], lane_min[1]), vpminq_f32(lane_min[2], lane_min[3])),
               before = vld1q_f32(s.row_max + row + r),
               now = vbslq_f32(vcgtq_f32(before, tile), before, tile);
      near = near && vminvq_u32(vcgeq_f32(vsubq_f32(low, now), vdupq_n_f32(-86.0f))) != 0;
      const uint32x4_t same =
          vandq_u32(vceqq_f32(before, now), vcgtq_f32(now, vdupq_n_f32(-__builtin_inff())));
      vst1q_f32(row_max + r, now);
      if (vminvq_u32(same) == 0) {
        for (int i = r; i < r + 4; ++i) {
          const float old = s.row_max[row + i];
          if (!(old == row_max[i] && row_max[i] > -__builtin_inff())) rescale(s, row + i, old - row_max[i]);
        }
      }
      vst1q_f32(s.row_max + row + r, now);
    }
    return near;
  }

  // ShortExp of numbers from -86 to 0.
  [[gnu::always_inline]] static void exp_of_eight(F4 (&x)[8]) {
    F4 shifted[8], f[8];
    const F4 log2_e = vdupq_n_f32(kExp.log2_e), magic = vdupq_n_f32(kExp.magic.lanes[0]),
             third = vdupq_n_f32(kShortExp.third);
    unroll<8>([&](auto i) { shifted[i] = vfmaq_f32(from_memory(kExp.magic.lanes), x[i], log2_e); });
    unroll<8>([&](auto i) { f[i] = vsubq_f32(magic, shifted[i]); });
    unroll<8>([&](auto i) { f[i] = vfmaq_f32(f[i], x[i], log2_e); });
    unroll<8>([&](auto i) { x[i] = vfmaq_f32(from_memory(kShortExp.half.lanes), third, f[i]); });
    unroll<8>([&](auto i) { x[i] = vfmaq_f32(from_memory(kShortExp.first.lanes), x[i], f[i]); });
    unroll<8>([&](auto i) { x[i] = vfmaq_f32(from_memory(kExp.one.lanes), x[i], f[i]); });
    unroll<8>([&](auto i) { x[i] = Simd::add_exponent(x[i], shifted[i]); });
  }

  template <bool kNear>
  static void exp_row(float* scores, float row_max, int32_t parts, int r, TileWeights& t) {
    F4 sums[4];
    unroll<4>([&](auto i) { sums[i] = vld1q_f32(scores + kTileTokens + 4 * i); });
    for (int32_t q = 0; q < kQuads; q += 8) {
      F4 x[8];
      unroll<8>([&](auto i) { x[i] = vsubq_f32(vld1q_f32(scores + 4 * (q + i)), vdupq_n_f32(row_max)); });
      if constexpr (kNear) {
        exp_of_eight(x);
      } else {
        unroll<2>([&](auto half) {
          F4* to = x + 4 * half;
          const V16 exp = exp16_below<ShortExp>({to[0], to[1], to[2], to[3]});
          to[0] = exp.a, to[1] = exp.b, to[2] = exp.c, to[3] = exp.d;
        });
      }
      unroll<8>([&](auto i) { sums[i % 4] = vaddq_f32(sums[i % 4], x[i]); });
      for (int32_t part = 0; part < parts; ++part) {
        F4 weight[8];
        unroll<8>([&](auto i) {
          weight[i] = vmulq_f32(x[i], t.scales[part][q + i]);
          t.weights[part][r][q + i] = weight[i];
        });
        unroll<4>([&](auto i) { weight[i] = vmaxq_f32(weight[i], weight[i + 4]); });
        F4 lane_max = vmaxq_f32(vmaxq_f32(weight[0], weight[1]), vmaxq_f32(weight[2], weight[3]));
        if (q > 0) lane_max = vmaxq_f32(lane_max, t.lane_max[part][r]);
        t.lane_max[part][r] = lane_max;
      }
    }
    unroll<4>([&](auto i) { vst1q_f32(scores + kTileTokens + 4 * i, sums[i]); });
  }

  static void codes_of_part(int32_t part, TileWeights& t) {
    alignas(16) float inverse[8];
    for (int r = 0; r < 8; r += 4) {
      const F4* lane_max = t.lane_max[part] + r;
      const F4 row_max =
          vpmaxq_f32(vpmaxq_f32(lane_max[0], lane_max[1]), vpmaxq_f32(lane_max[2], lane_max[3]));
      const uint32x4_t zero = vcltq_f32(row_max, vdupq_n_f32(1e-35f));
      const auto unless_zero = [&](F4 x) {
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), zero));
      };
      vst1q_f32(inverse + r, unless_zero(vdivq_f32(vdupq_n_f32(127.0f), row_max)));
      vst1q_f32(t.unit[part] + r, unless_zero(vdivq_f32(row_max, vdupq_n_f32(127.0f))));
    }
    for (int r = 0; r < 8; ++r) {
      const F4 by = vdupq_n_f32(inverse[r]);
      for (int32_t q = 0; q < kQuads; q += 8) {
        F4 code[8];  // in the last byte
        unroll<8>([&](auto i) {
          code[i] = vfmaq_f32(from_memory(kExp.magic.lanes), t.weights[part][r][q + i], by);
        });
        Simd::store_low_bytes({code[0], code[1], code[2], code[3]}, t.codes[part][r] + 4 * q);
        Simd::store_low_bytes({code[4], code[5], code[6], code[7]}, t.codes[part][r] + 4 * q + kLanes);
      }
    }
  }

  // acc[r][first .. first + 32) += unit[r] * sum over the blocks' tokens of code * value.
  static void add_part(const AttentionSplit& s, const Tile& tile, int row, const int8_t (*codes)[kTileTokens],
                       const float* unit, int32_t first) {
    const int64_t group = static_cast<int64_t>(s.head_dim) * KvInt8::kTogether, dim = s.padded_dim;
    const int64_t codes_at = s.value_offset + codes_offset(s.head_dim);
    const float32x4_t origin = vdupq_n_f32(kFloatOfOrigin), unit0 = vld1q_f32(unit),
                      unit1 = vld1q_f32(unit + 4);
    const int32_t lo = tile.lo, hi = tile.hi;
    const bool prefetches = row == 0;
    for (int32_t c = first; c < first + KvInt8::kScaleDims; c += 8) {
      int32x4_t sums[8][2];
      clear(sums);
      for (int32_t b = lo; b < hi; ++b) {
        if (prefetches) {
          const uint8_t* next = tile.next[b];
          if (c == first) __builtin_prefetch(next + s.value_offset, 0, 3);
          prefetch(next + codes_at + c / 8 * kPrefetchBytes);
        }
        const auto* values =
            reinterpret_cast<const int8_t*>(tile.block[b] + codes_at + c * KvInt8::kTogether);
        int8x16_t x[8];
        unroll<8>([&](auto r) { x[r] = vld1q_s8(codes[r] + b * kLanes); });
        unroll<4>([&](auto lane) {
          constexpr int kLane = decltype(lane){};
          const int8x16_t v0 = vld1q_s8(values + lane * group), v1 = vld1q_s8(values + lane * group + 16);
          unroll<8>([&](auto r) {
            sums[r][0] = vdotq_laneq_s32(sums[r][0], v0, x[r], kLane);
            sums[r][1] = vdotq_laneq_s32(sums[r][1], v1, x[r], kLane);
          });
        });
      }
      float* to = s.acc + row * dim + c;
      unroll<8>([&](auto r) {
        constexpr int kLane = decltype(r){} % 4;
        const float32x4_t by = r < 4 ? unit0 : unit1;
        const float32x4_t lo4 = vld1q_f32(to + r * dim), hi4 = vld1q_f32(to + r * dim + 4);
        vst1q_f32(to + r * dim, vfmaq_laneq_f32(lo4, to_float(sums[r][0], origin), by, kLane));
        vst1q_f32(to + r * dim + 4, vfmaq_laneq_f32(hi4, to_float(sums[r][1], origin), by, kLane));
      });
    }
  }
};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
