// The arithmetic of attention by bf16 tiles of the AMX unit, for a set of eight rows: queries and weights as
// two bf16 numbers each, keys and values in pairs, scores to softmax to weights, sums to accumulators. Both
// orders in which it is done (paged_amx.h, decode_amx.h) use it, number by number.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/attention/kv_tiles.h"
#include "kernels/cpu/attention/online_softmax_avx512.h"
#include "kernels/cpu/matmul/formats_x86.h"
#include "kernels/cpu/matmul/gemv_x86.h"
#include "kernels/cpu/simd/amx.h"
#include "kernels/cpu/simd/exp.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/tanh.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

constexpr int32_t kMaxTileDim = 256;              // of a head
constexpr int32_t kMaxSets = 4;                   // of them in a split: callers make tiles of 32 rows
constexpr int32_t kHalfTokens = kTileTokens / 2;  // the depth of a product with values

// Of a set of rows and a tile.
struct SetScratch {
  alignas(64) uint16_t weights[2][16][32];  // [half][row: upper, lower][tokens t, t + 16 in turn]
  alignas(64) float sums[4][16][16];
  alignas(64) float scores[kSetRows][kTileTokens];
};
struct AttendTiles : SetScratch {
  alignas(64) uint16_t keys[kTileTokens * kMaxTileDim];    // [block][dims / 2][16 tokens][2 dims]
  alignas(64) uint16_t values[kTileTokens * kMaxTileDim];  // [half][dims / 16][16][16 dims][tokens t, t + 16]
};
// Queries of eight rows and 32 dimensions: [row: upper, lower][32]. A head has them as [set][dims / 32].
using QueryWords = uint16_t[16][32];

// A float as two bf16 numbers: the upper half of its bits as it is, and what that leaves, rounded.
struct Halves {
  V upper, lower;  // in the upper half of a dword; the rest is not zero
};
[[gnu::always_inline]] inline Halves split_float(V16 x) {
  const V upper = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN >> 15));
  const V16 left = Simd::sub(x, _mm512_castsi512_ps(upper));
  return {upper, _mm512_add_epi32(_mm512_castps_si512(left), _mm512_set1_epi32(0x8000))};
}

inline void split_queries(const AttentionSplit& s, QueryWords* queries) {
  for (int32_t row = 0; row < (s.rows + kSetRows - 1) / kSetRows * kSetRows; ++row) {
    for (int32_t d = 0; d < s.head_dim; d += kLanes) {
      const auto to = queries[(row / kSetRows * s.head_dim + d) / 32];
      const Halves q = split_float(row < s.rows ? Simd::load(s.query[row] + d) : Simd::zero());
      const auto store = [&](V words, uint16_t* at) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(at),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)));
      };
      store(q.upper, to[row % kSetRows] + d % 32);
      store(q.lower, to[row % kSetRows + kSetRows] + d % 32);
    }
  }
}

// Two dimensions of sixteen keys, one behind the other, to pairs.
struct PairOrder {
  uint16_t word[32];
};
constexpr PairOrder make_pair_order() {
  PairOrder order{};
  for (int i = 0; i < 32; ++i) order.word[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  return order;
}
alignas(64) constexpr PairOrder kPairOrder = make_pair_order();

// 32 values of a token t and as many of token t + 16 to pairs: of each quarter i the dimensions 8 i ..
// 8 i + 3 to a row of one tile, 8 i + 4 .. 8 i + 7 to the next one's (dims_in_order puts the sums right).
// magnitudes: the largest of each lane, as bits.
[[gnu::always_inline]] inline void pair_value_line(V a, V b, uint16_t* to, V& magnitudes) {
  const V magnitude = _mm512_set1_epi16(0x7fff);
  magnitudes = _mm512_max_epu16(
      magnitudes, _mm512_max_epu16(_mm512_and_si512(a, magnitude), _mm512_and_si512(b, magnitude)));
  _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
  _mm512_store_si512(to + kLanes * 32, _mm512_unpackhi_epi16(a, b));
}
[[gnu::always_inline]] inline bool all_finite(V magnitudes) {
  return _mm512_cmpge_epu16_mask(magnitudes, _mm512_set1_epi16(0x7f80)) == 0;
}

// Where a dimension lies in a row of sums.
inline int32_t place_of_dim(int32_t dim) {
  return dim / 32 * 32 + dim % 8 / 4 * kLanes + dim % 32 / 8 * 4 + dim % 4;
}
// The sums of a row from those places to their own.
inline void dims_in_order(float* acc_row, int32_t dims) {
  for (int32_t c = 0; c < dims; c += 32) {
    const V16 low = Simd::load(acc_row + c), high = Simd::load(acc_row + c + kLanes);
    const V16 first = _mm512_shuffle_f32x4(low, high, 0x44), last = _mm512_shuffle_f32x4(low, high, 0xee);
    Simd::store(acc_row + c, _mm512_shuffle_f32x4(first, first, 0xd8));
    Simd::store(acc_row + c + kLanes, _mm512_shuffle_f32x4(last, last, 0xd8));
  }
}

template <int kTile>
[[gnu::always_inline]] inline void bf16_product(const uint16_t* b) {  // with tile 4
  _tile_loadd(5, b, 64);
  if constexpr (kTile == 0) _tile_dpbf16ps(0, 4, 5);
  if constexpr (kTile == 1) _tile_dpbf16ps(1, 4, 5);
  if constexpr (kTile == 2) _tile_dpbf16ps(2, 4, 5);
  if constexpr (kTile == 3) _tile_dpbf16ps(3, 4, 5);
}
inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
inline void store_tile_sums(float (*sums)[16][16]) {
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  compiler_fence();
}

// The rows of a set, and what each sees of the tile.
struct SetRows {
  int32_t row, count;  // of the split's
  int32_t from[kSetRows] = {}, to[kSetRows] = {};
  unsigned seeing = 0;  // a bit for each that sees something
  bool whole = true;    // eight rows that see all of it
  SetRows(const AttentionSplit& s, const Tile& tile, int32_t first)
      : row(first), count(s.rows - first < kSetRows ? s.rows - first : kSetRows) {
    for (int32_t r = 0; r < count; ++r) {
      from[r] = clip(s.first[row + r] - tile.start);
      to[r] = clip(s.last[row + r] - tile.start);
      seeing |= static_cast<unsigned>(from[r] < to[r]) << r;
      whole &= to[r] - from[r] == kTileTokens;
    }
    whole &= count == kSetRows;
  }
  // The lanes of a block that row r sees.
  __mmask16 lanes(int32_t r, int32_t block) const {
    const uint64_t seen = from[r] < to[r] ? ~uint64_t{0} >> (63 - (to[r] - 1)) & ~uint64_t{0} << from[r] : 0;
    return static_cast<__mmask16>(seen >> (block * kLanes));
  }
};

// The sums of scores of a set to weights exp(score - largest) as rows of tiles, zero where a row does not
// see; earlier sums are rescaled where a row has a new largest score. The numbers of softmax_row(), for eight
// rows side by side: one after the other each would wait for its own. keep: weights are also left in
// s.scores. beside(step), of 2 kSetRows steps: what else is done meanwhile.
template <bool kWhole, class Beside>
[[gnu::always_inline]] inline void softmax_set(const AttentionSplit& s, const SetRows& set, bool keep,
                                               Beside& beside, SetScratch& t) {
  const V16 scale = Simd::broadcast(s.scale), never = Simd::broadcast(-__builtin_inff());
  const int64_t stride = kTileTokens + kLanes;
  V16 lane_max[kSetRows];
  unroll<kSetRows>([&](auto r) __attribute__((always_inline)) {
    V16 score[4];
    unroll<4>([&](auto b) __attribute__((always_inline)) {
      score[b] = Simd::mul(Simd::add(Simd::load(t.sums[b][r]), Simd::load(t.sums[b][r + kSetRows])), scale);
      if (s.softcap > 0.0f) score[b] = softcap16(score[b], s.softcap);
      if constexpr (!kWhole) score[b] = _mm512_mask_mov_ps(never, set.lanes(r, b), score[b]);
      Simd::store(t.scores[r] + b * kLanes, score[b]);
    });
    lane_max[r] = _mm512_max_ps(_mm512_max_ps(score[0], score[1]), _mm512_max_ps(score[2], score[3]));
    beside(r);
  });
  const auto seeing = static_cast<__mmask16>(set.seeing);
  const V16 before = _mm512_maskz_loadu_ps(first_lanes(set.count), s.row_max + set.row);
  const V16 now = _mm512_mask_max_ps(before, seeing, before, max_of_eight(lane_max));
  _mm512_mask_storeu_ps(s.row_max + set.row, seeing, now);
  const unsigned changed = set.seeing & _mm512_cmp_ps_mask(before, now, _CMP_NEQ_UQ);
  alignas(64) float row_max[kLanes], factor[kLanes];
  Simd::store(row_max, now);
  if (changed != 0) {
    Simd::store(factor, exp_below(Simd::sub(before, now)));
    for (int32_t r = 0; r < kSetRows; ++r) {
      if ((changed >> r & 1) == 0) continue;
      const V16 by = Simd::broadcast(factor[r]);
      float* acc_row = s.acc + (set.row + r) * static_cast<int64_t>(s.padded_dim);
      float* lane_sums = s.scores + (set.row + r) * stride + kTileTokens;
      Simd::store(lane_sums, Simd::mul(Simd::load(lane_sums), by));
      for (int32_t c = 0; c < s.padded_dim; c += kLanes) {
        Simd::store(acc_row + c, Simd::mul(Simd::load(acc_row + c), by));
      }
    }
  }
  unroll<kSetRows>([&](auto r) __attribute__((always_inline)) {
    V16 weight[4];
    if (!kWhole && (set.seeing >> r & 1) == 0) {
      unroll<4>([&](auto b) { weight[b] = Simd::zero(); });
    } else {
      const V16 top = Simd::broadcast(row_max[r]);
      float* scores = s.scores + (set.row + r) * stride;
      unroll<4>([&](auto b) __attribute__((always_inline)) {
        weight[b] = exp_below(Simd::sub(Simd::load(t.scores[r] + b * kLanes), top));
      });
      V16 sums = Simd::load(scores + kTileTokens);
      unroll<4>([&](auto b) { sums = Simd::add(sums, weight[b]); });
      Simd::store(scores + kTileTokens, sums);
      if (keep) unroll<4>([&](auto b) { Simd::store(scores + b * kLanes, weight[b]); });
    }
    unroll<2>([&](auto half) __attribute__((always_inline)) {
      const Halves a = split_float(weight[2 * half]), b = split_float(weight[2 * half + 1]);
      const auto both = [](V first, V second) __attribute__((always_inline)) {
        return blend_bits(_mm512_srli_epi32(first, 16), second, 0xffff0000ffff0000);
      };
      _mm512_store_si512(t.weights[half][r], both(a.upper, b.upper));
      _mm512_store_si512(t.weights[half][r + kSetRows], both(a.lower, b.lower));
    });
    beside(kSetRows + r);
  });
}

// The sums in tiles [0, count) to those of the set's rows that see some of the tile, from sixteen dimensions
// `first` on.
[[gnu::always_inline]] inline void add_sums(const AttentionSplit& s, const SetRows& set, int32_t first,
                                            int32_t count, SetScratch& t) {
  store_tile_sums(t.sums);
  for (int32_t r = 0; r < set.count; ++r) {
    if ((set.seeing >> r & 1) == 0) continue;
    float* to = s.acc + (set.row + r) * static_cast<int64_t>(s.padded_dim) + first * kLanes;
    unroll<4>([&](auto i) __attribute__((always_inline)) {
      if (i >= count) return;
      const V16 sum = Simd::add(Simd::load(t.sums[i][r]), Simd::load(t.sums[i][r + kSetRows]));
      Simd::store(to + i * kLanes, Simd::add(Simd::load(to + i * kLanes), sum));
    });
  }
}

// Values that are no numbers may be a token's that nobody sees, and a weight of zero does not hide them:
// they leave the scratch, and reach the rows that do see them here.
[[gnu::noinline]] inline void zero_nonfinite_values(int32_t dims, uint16_t* values) {
  for (int32_t i = 0; i < kTileTokens * dims; ++i) {
    if ((values[i] & 0x7f80) == 0x7f80) values[i] = 0;
  }
}
[[gnu::noinline]] inline void add_nonfinite_values(const AttentionSplit& s, const Tile& tile, int32_t row,
                                                   int32_t from, int32_t to) {
  const float* weights = s.scores + row * static_cast<int64_t>(kTileTokens + kLanes);
  for (int32_t token = from; token < to; ++token) {
    const auto* values = reinterpret_cast<const uint16_t*>(tile.block[token / kLanes] + s.value_offset) +
                         token % kLanes * static_cast<int64_t>(s.head_dim);
    for (int32_t d = 0; d < s.head_dim; ++d) {
      if ((values[d] & 0x7f80) != 0x7f80) continue;
      const uint32_t bits = static_cast<uint32_t>(values[d]) << 16;
      float value;
      __builtin_memcpy(&value, &bits, 4);
      s.acc[row * static_cast<int64_t>(s.padded_dim) + place_of_dim(d)] += weights[token] * value;
    }
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
