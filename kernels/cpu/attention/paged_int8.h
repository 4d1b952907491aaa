// Attention over an int8 cache, in integers. Queries come as blocks of 32 int8 (ActivationBlock), keys and
// values lie as int8 with a scale per 32 dimensions of a token, so that scores are integer dot products; the
// weights of a row's tile are multiplied with their tokens' scales and rounded to seven bits of the largest
// of them, so that weighted values are too. Integer sums are exact in any order: all tables have the same
// bits.
//
// What a row computes, per tile of 64 tokens and 32 dimensions:
//   score[t] = sum over 32s of dimensions of float(q . k_t) * d_k[t] * (d_q * scale), fused, in order
//   w[t]     = weight[t] * d_v[t], u = max w / 127, c[t] = nearest(w[t] * (127 / max w))
//   acc     += u * float(sum of c[t] v_t)
// Codes of keys lie [head_dim / 4][16 tokens][4 dimensions] and those of values [4][head_dim][4 tokens], so
// that an instruction which adds four products to a lane takes them as they lie: a lane is a token, then a
// dimension. Roofline: per token and KV head of 64 dimensions and eight rows 1,024 products for 136 bytes.
#pragma once

#include <stdint.h>

#include "kernels/cpu/attention/kv_tiles.h"
#include "kernels/cpu/simd/exp.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

struct KvInt8 {
  static constexpr bool kIntegers = true;
  static constexpr int32_t kScaleDims = 32, kTogether = 4;  // codes that are added up in a lane
  static constexpr int32_t kGroupBytes = kLanes * kTogether;
  static const uint16_t* scales(const uint8_t* head, int32_t part) {
    return reinterpret_cast<const uint16_t*>(head) + part * kLanes;
  }
  static const uint8_t* codes(const uint8_t* head, int32_t dim) {
    return head + dim / kScaleDims * kLanes * static_cast<int32_t>(sizeof(uint16_t));
  }
};

// exp to 1.0e-4 of itself, for weights that become codes of seven bits: x log2(e) = n + f, |f| <= 1/2, and
// 2^f by a polynomial of degree 3 that is exactly one at zero.
struct ShortExpConstants {
  float third = 5.5008933e-2f;
  Constant half = constant(0.24221097f), first = constant(0.6932829f);
};
inline constexpr ShortExpConstants kShortExp;
struct ShortExp {
  [[gnu::always_inline]] static ExpParts parts(V16 bounded) {
    const V16 log2_e = Simd::broadcast(kExp.log2_e);
    const V16 shifted = fma_constant(bounded, log2_e, kExp.magic);
    const V16 f = Simd::fma(bounded, log2_e, Simd::sub(Simd::broadcast(kExp.magic.lanes[0]), shifted));
    V16 p = fma_constant(Simd::broadcast(kShortExp.third), f, kShortExp.half);
    p = fma_constant(p, f, kShortExp.first);
    return {fma_constant(p, f, kExp.one), shifted};
  }
};

// Weights of a row's tokens [from, to), times their values' scales, to codes of blocks [lo, hi); returns what
// a code stands for. A token that is not seen has the code zero, whatever lies in the cache there.
template <bool kWhole>
[[gnu::always_inline]] inline float weights_to_codes(const float* weights, const float* scales, int32_t from,
                                                     int32_t to, int32_t lo, int32_t hi, int8_t* codes) {
  constexpr int32_t kBlocks = kTileTokens / kLanes;
  V16 weight[kBlocks];
  V16 lane_max = Simd::zero();
  unroll<kBlocks>([&](auto b) {
    weight[b] = Simd::zero();
    if (!kWhole && (b * kLanes >= to || (b + 1) * kLanes <= from)) return;
    const V16 plain = Simd::load(weights + b * kLanes);
    weight[b] = Simd::mul(plain, Simd::load(scales + b * kLanes));
    if (!kWhole) weight[b] = Simd::select_less(Simd::zero(), plain, weight[b], Simd::zero());
    lane_max = Simd::max(lane_max, weight[b]);
  });
  const float max_weight = Simd::reduce_max(lane_max);
  const bool zero = max_weight < 1e-35f;  // as `quantize` has it
  const V16 inverse = Simd::broadcast(zero ? 0.0f : 127.0f / max_weight);
  unroll<kBlocks>([&](auto b) {
    if (kWhole || (b >= lo && b < hi)) {
      Simd::store_low_bytes(fma_constant(weight[b], inverse, kExp.magic), codes + b * kLanes);
    }
  });
  return zero ? 0.0f : max_weight / 127.0f;
}

// kR rows that share loads of keys and of values.
template <int kR>
struct SharedIntegerRows {
  // Scores of kUnroll blocks; each 32 dimensions' share is added to what lies there.
  template <int kUnroll>
  static void score_blocks(const AttentionSplit& s, int row, const Tile& tile, int32_t b, float* scores,
                           int64_t stride) {
    constexpr int32_t kPartBytes = KvInt8::kScaleDims * kLanes;
    for (int32_t part = 0; part < s.head_dim / KvInt8::kScaleDims; ++part) {
      const ActivationBlock* q[kR];
      Simd::I16 sums[kUnroll][kR];
      unroll<kR>([&](auto r) {
        q[r] = s.query_blocks[row + r] + part;
        unroll<kUnroll>([&](auto w) { sums[w][r] = Simd::begin_keys(q[r]->sum); });
      });
      const uint8_t *keys[kUnroll], *next[kUnroll], *far[kUnroll];
      unroll<kUnroll>([&](auto w) {
        if constexpr (kAtOnce > 1) {  // the lines of scales
          if (part == 0) {
            __builtin_prefetch(tile.far[b + w] + s.key_offset, 0, 2);
            __builtin_prefetch(tile.far[b + w] + s.value_offset, 0, 2);
          }
        }
        const auto codes = [&](const uint8_t* block) {
          return KvInt8::codes(block + s.key_offset, s.head_dim) + part * kPartBytes;
        };
        keys[w] = codes(tile.block[b + w]);
        next[w] = codes(tile.next[b + w]);
        far[w] = codes(tile.far[b + w]);
      });
      for (int32_t at = 0; at < kPartBytes; at += KvInt8::kGroupBytes) {
        if constexpr (kAtOnce > 1) {
          for (int w = 0; w < kUnroll; ++w) {
            __builtin_prefetch(next[w] + at, 0, 3);
            __builtin_prefetch(far[w] + at, 0, 2);
          }
        }
        Simd::Keys key[kUnroll];
        unroll<kUnroll>([&](auto w) { key[w] = Simd::load_keys(keys[w] + at); });
        unroll<kR>([&](auto r) {
          unroll<kUnroll>(
              [&](auto w) { sums[w][r] = Simd::dot_keys(sums[w][r], key[w], q[r]->q + at / kLanes); });
        });
      }
      unroll<kUnroll>([&](auto w) {
        const V16 d = Simd::load_f16(KvInt8::scales(tile.block[b + w] + s.key_offset, part));
        unroll<kR>([&](auto r) {
          float* to = scores + r * stride + w * kLanes;
          const V16 by = Simd::broadcast(q[r]->scale * s.scale),
                    sum = Simd::mul(Simd::to_float(sums[w][r]), d);
          Simd::store(to, part == 0 ? Simd::mul(sum, by) : Simd::fma(sum, by, Simd::load(to)));
        });
      });
    }
  }
  static void score_tile(const AttentionSplit& s, const Tile& tile, int row) {
    const int64_t stride = kTileTokens + kLanes;
    float* scores = s.scores + row * stride;
    int32_t b = tile.lo;
    if constexpr (kAtOnce > 1) {
      for (; b + kAtOnce <= tile.hi; b += kAtOnce) {
        score_blocks<kAtOnce>(s, row, tile, b, scores + b * kLanes, stride);
      }
    }
    for (; b < tile.hi; ++b) score_blocks<1>(s, row, tile, b, scores + b * kLanes, stride);
  }

  // acc[r][c .. c + 16 kUnroll) += unit[r] * sum over the blocks' tokens of code * value.
  template <int kUnroll>
  static void add_dims(const AttentionSplit& s, const Tile& tile, int row, const int8_t (*codes)[kTileTokens],
                       const float* unit, int32_t c) {
    Simd::I16 sums[kUnroll][kR];
    unroll<kUnroll>([&](auto w) { unroll<kR>([&](auto r) { sums[w][r] = Simd::zero_sums(); }); });
    const int64_t group = static_cast<int64_t>(s.head_dim) * KvInt8::kTogether;
    for (int32_t b = tile.lo; b < tile.hi; ++b) {
      const auto at = [&](const uint8_t* block) {
        return KvInt8::codes(block + s.value_offset, s.head_dim) + c * KvInt8::kTogether;
      };
      const uint8_t *values = at(tile.block[b]), *next = at(tile.next[b]), *far = at(tile.far[b]);
      for (int32_t t = 0; t < kLanes; t += KvInt8::kTogether) {
        Simd::Codes value[kUnroll];
        unroll<kUnroll>([&](auto w) { value[w] = Simd::load_codes(values + w * KvInt8::kGroupBytes); });
        if constexpr (kAtOnce > 1) {
          for (int w = 0; w < kUnroll; ++w) {
            __builtin_prefetch(next + w * KvInt8::kGroupBytes, 0, 3);
            __builtin_prefetch(far + w * KvInt8::kGroupBytes, 0, 2);
          }
        }
        unroll<kR>([&](auto r) {
          unroll<kUnroll>([&](auto w) {
            sums[w][r] = Simd::dot_not_negative(sums[w][r], value[w], codes[r] + b * kLanes + t);
          });
        });
        values += group;
        next += group;
        far += group;
      }
    }
    unroll<kR>([&](auto r) {
      float* to = s.acc + (row + r) * static_cast<int64_t>(s.padded_dim) + c;
      const V16 by = Simd::broadcast(unit[r]);
      unroll<kUnroll>([&](auto w) {
        Simd::store(to + w * kLanes, Simd::fma(Simd::to_float(sums[w][r]), by, Simd::load(to + w * kLanes)));
      });
    });
  }
  static void add_part(const AttentionSplit& s, const Tile& tile, int row, const int8_t (*codes)[kTileTokens],
                       const float* unit, int32_t c) {
    static_assert(KvInt8::kScaleDims % (kAtOnce * kLanes) == 0);
    for (int32_t i = 0; i < KvInt8::kScaleDims; i += kAtOnce * kLanes) {
      add_dims<kAtOnce>(s, tile, row, codes, unit, c + i);
    }
  }
};

// A table may have its own for some numbers of rows, and with it `weigh`: softmax and codes of all of them.
template <int kR>
struct IntegerRows : SharedIntegerRows<kR> {};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
