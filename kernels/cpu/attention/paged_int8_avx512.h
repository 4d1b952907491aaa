// Eight query rows over an int8 cache with AVX-512: softmax and the weights' codes (paged_int8.h), the same
// numbers, for eight rows side by side. Roofline: per 64 tokens of a KV head of 64 dimensions (8.5 KiB) 1,024
// dot products; softmax and codes, some 1,000 vector operations.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/attention/online_softmax.h"
#include "kernels/cpu/attention/online_softmax_avx512.h"
#include "kernels/cpu/attention/paged_int8.h"
#include "kernels/cpu/simd/avx512.h"
#include "kernels/cpu/simd/exp.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

template <>
struct IntegerRows<kSetRows> : SharedIntegerRows<kSetRows> {
  static constexpr int32_t kMaxParts = 8, kBlocks = kTileTokens / kLanes;
  struct TileWeights {
    alignas(64) float scales[kMaxParts][kTileTokens];
    alignas(64) float weights[kMaxParts][kSetRows][kTileTokens];  // times those
    alignas(64) float lane_max[kMaxParts][kSetRows][kLanes];
    alignas(64) int8_t codes[kMaxParts][kSetRows][kTileTokens];
    alignas(64) float unit[kMaxParts][kLanes];
  };
  // False, and nothing is done, where something is no number: those that are must not be lost to it.
  static bool softmax_to_codes(const AttentionSplit& s, const Tile& tile, int row, TileWeights& t) {
    const int32_t parts = s.head_dim / KvInt8::kScaleDims;
    const int64_t stride = kTileTokens + kLanes;
    float* const scores = s.scores + row * stride;
    unsigned damaged = 0;
    for (int32_t part = 0; part < parts; ++part) {
      unroll<kBlocks>([&](auto b) {
        const V16 scale = Simd::load_f16(KvInt8::scales(tile.block[b] + s.value_offset, part));
        damaged |= _mm512_cmp_ps_mask(scale, scale, _CMP_UNORD_Q);
        Simd::store(t.scales[part] + b * kLanes, scale);
      });
    }
    V16 lane_max[kSetRows], lane_min[kSetRows];
    unroll<kSetRows>([&](auto r) __attribute__((always_inline)) {
      V16 score[kBlocks];
      unroll<kBlocks>([&](auto b) { score[b] = Simd::load(scores + r * stride + b * kLanes); });
      damaged |= _mm512_cmp_ps_mask(score[0], score[1], _CMP_UNORD_Q);
      damaged |= _mm512_cmp_ps_mask(score[2], score[3], _CMP_UNORD_Q);
      lane_max[r] = _mm512_max_ps(_mm512_max_ps(score[0], score[1]), _mm512_max_ps(score[2], score[3]));
      lane_min[r] = _mm512_min_ps(_mm512_min_ps(score[0], score[1]), _mm512_min_ps(score[2], score[3]));
    });
    constexpr __mmask16 kRows = (1 << kSetRows) - 1;
    const V16 before = _mm512_maskz_loadu_ps(kRows, s.row_max + row);
    const V16 now = _mm512_max_ps(before, max_of_eight(lane_max));
    damaged |= kRows & _mm512_cmp_ps_mask(now, Simd::broadcast(-__builtin_inff()), _CMP_NGT_UQ);
    damaged |= _mm512_cmp_ps_mask(before, before, _CMP_UNORD_Q);
    if (damaged != 0) [[unlikely]]
      return false;
    _mm512_mask_storeu_ps(s.row_max + row, kRows, now);
    alignas(64) float row_max[kLanes], by[kLanes];
    Simd::store(row_max, now);
    Simd::store(by, Simd::sub(before, now));
    const unsigned changed = kRows & _mm512_cmp_ps_mask(before, now, _CMP_NEQ_OQ);
    for (int r = 0; r < kSetRows && changed >> r != 0; ++r) {
      if ((changed >> r & 1) != 0) rescale(s, row + r, by[r]);
    }
    // No exponent so small that its exponential is zero: nothing is clamped.
    const V16 down = Simd::sub(min_of_eight(lane_min), now);
    const bool near = (kRows & _mm512_cmp_ps_mask(down, Simd::broadcast(-86.0f), _CMP_NGE_UQ)) == 0;
    for (int r = 0; r < kSetRows; ++r) {
      near ? exp_row<true>(scores + r * stride, row_max[r], parts, r, t)
           : exp_row<false>(scores + r * stride, row_max[r], parts, r, t);
    }
    for (int32_t part = 0; part < parts; ++part) codes_of_part(part, t);
    return true;
  }

  template <bool kNear>
  [[gnu::always_inline]] static void exp_row(float* scores, float row_max, int32_t parts, int r,
                                             TileWeights& t) {
    const V16 top = Simd::broadcast(row_max);
    V16 weight[kBlocks], sums = Simd::load(scores + kTileTokens);
    unroll<kBlocks>([&](auto b) __attribute__((always_inline)) {
      const V16 x = Simd::sub(Simd::load(scores + b * kLanes), top);
      if constexpr (kNear) {
        const auto [p, shifted] = ShortExp::parts(x);
        weight[b] = Simd::add_exponent(p, shifted);
      } else {
        weight[b] = exp_below<ShortExp>(x);
      }
    });
    unroll<kBlocks>([&](auto b) { sums = Simd::add(sums, weight[b]); });
    Simd::store(scores + kTileTokens, sums);
    for (int32_t part = 0; part < parts; ++part) {
      V16 scaled[kBlocks];
      unroll<kBlocks>([&](auto b) {
        scaled[b] = Simd::mul(weight[b], Simd::load(t.scales[part] + b * kLanes));
        Simd::store(t.weights[part][r] + b * kLanes, scaled[b]);
      });
      Simd::store(t.lane_max[part][r],
                  _mm512_max_ps(_mm512_max_ps(scaled[0], scaled[1]), _mm512_max_ps(scaled[2], scaled[3])));
    }
  }

  [[gnu::always_inline]] static void codes_of_part(int32_t part, TileWeights& t) {
    V16 lane_max[kSetRows];
    unroll<kSetRows>([&](auto r) { lane_max[r] = Simd::load(t.lane_max[part][r]); });
    const V16 row_max = max_of_eight(lane_max), full = Simd::broadcast(127.0f);
    const __mmask16 some = _mm512_cmp_ps_mask(row_max, Simd::broadcast(1e-35f), _CMP_NLT_UQ);
    alignas(64) float inverse[kLanes];
    Simd::store(inverse, _mm512_maskz_div_ps(some, full, row_max));
    Simd::store(t.unit[part], _mm512_maskz_div_ps(some, row_max, full));
    for (int r = 0; r < kSetRows; ++r) {
      const V16 by = Simd::broadcast(inverse[r]);
      unroll<kBlocks>([&](auto b) __attribute__((always_inline)) {
        const V16 weight = Simd::load(t.weights[part][r] + b * kLanes);
        Simd::store_low_bytes(fma_constant(weight, by, kExp.magic), t.codes[part][r] + b * kLanes);
      });
    }
  }
};

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
