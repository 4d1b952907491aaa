// Attention over one split of a paged cache for the query rows that share a KV head: online softmax, a tile
// of 64 positions at a time, for caches of floats and of int8.
//
// A row's arithmetic depends on its own query, its own visible range and the tiles' absolute positions only,
// so rows are grouped freely (four or eight at a time share each load of keys and values).
#pragma once

#include <stdint.h>

#include "kernels/cpu/attention/kv_tiles.h"
#include "kernels/cpu/attention/online_softmax.h"
#include "kernels/cpu/attention/paged_float.h"
#include "kernels/cpu/attention/paged_int8.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/tables/kernel_table.h"
#if defined(MILLRACE_HAS_DOTPROD)
#include "kernels/cpu/attention/paged_float_neon.h"
#include "kernels/cpu/attention/paged_int8_neon.h"
#elif defined(MILLRACE_SIMD_AVX512)
#include "kernels/cpu/attention/paged_int8_avx512.h"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// kR rows through one tile.
template <int kR>
void attend_integer_rows(const AttentionSplit& s, const Tile& tile, int row) {
  int32_t from[kR], to[kR];
  bool whole = tile.lo == 0 && tile.hi == kTileTokens / kLanes;
  for (int r = 0; r < kR; ++r) {
    from[r] = clip(s.first[row + r] - tile.start);
    to[r] = clip(s.last[row + r] - tile.start);
    whole = whole && from[r] == 0 && to[r] == kTileTokens;
  }
  IntegerRows<kR>::score_tile(s, tile, row);
  if constexpr (requires { IntegerRows<kR>::kMaxParts; }) {
    if (whole && s.softcap == 0.0f && s.head_dim <= IntegerRows<kR>::kMaxParts * KvInt8::kScaleDims) {
      typename IntegerRows<kR>::TileWeights weights;
      if (IntegerRows<kR>::softmax_to_codes(s, tile, row, weights)) {
        for (int32_t part = 0; part < s.head_dim / KvInt8::kScaleDims; ++part) {
          IntegerRows<kR>::add_part(s, tile, row, weights.codes[part], weights.unit[part],
                                    part * KvInt8::kScaleDims);
        }
        return;
      }
    }
  }
  for (int r = 0; r < kR; ++r) {
    if (from[r] < to[r]) softmax_row<ShortExp>(s, row + r, from[r], to[r]);
  }
  for (int32_t part = 0; part < s.head_dim / KvInt8::kScaleDims; ++part) {
    alignas(64) float scales[kTileTokens];
    alignas(64) int8_t codes[kR][kTileTokens];
    float unit[kR];
    for (int32_t b = tile.lo; b < tile.hi; ++b) {
      const uint16_t* half = KvInt8::scales(tile.block[b] + s.value_offset, part);
      Simd::store(scales + b * kLanes, Simd::load_f16(half));
    }
    for (int r = 0; r < kR; ++r) {
      const float* weights = s.scores + (row + r) * static_cast<int64_t>(kTileTokens + kLanes);
      unit[r] = whole ? weights_to_codes<true>(weights, scales, 0, kTileTokens, 0, 0, codes[r])
                      : weights_to_codes<false>(weights, scales, from[r], to[r], tile.lo, tile.hi, codes[r]);
    }
    IntegerRows<kR>::add_part(s, tile, row, codes, unit, part * KvInt8::kScaleDims);
  }
}

// The sum of weighted values of kR rows over a tile, whose weights are in s.scores. Tokens that all rows see
// share loads; those before and after are taken row by row, so that every row adds its own tokens, and only
// those, in order.
template <class Kv, int kR>
void add_float_values(const AttentionSplit& s, const Tile& tile, int row, const int32_t* from,
                      const int32_t* to) {
  int32_t all_from = 0, all_to = kTileTokens;
  for (int r = 0; r < kR; ++r) {
    all_from = from[r] > all_from ? from[r] : all_from;
    all_to = to[r] < all_to ? to[r] : all_to;
  }
  if (all_from >= all_to) {
    for (int r = 0; r < kR; ++r) SharedRows<Kv, 1>::add_values(s, tile, row + r, from[r], to[r]);
    return;
  }
  for (int r = 0; r < kR; ++r) {
    if (from[r] < all_from) SharedRows<Kv, 1>::add_values(s, tile, row + r, from[r], all_from);
  }
  SharedRows<Kv, kR>::add_values(s, tile, row, all_from, all_to);
  for (int r = 0; r < kR; ++r) {
    if (all_to < to[r]) SharedRows<Kv, 1>::add_values(s, tile, row + r, all_to, to[r]);
  }
}

// The keys of a tile as values: from [head_dim][16] to [16][head_dim] floats, block by block.
template <class Kv>
void turn_keys(const AttentionSplit& s, const Tile& tile) {
  for (int32_t b = tile.lo; b < tile.hi; ++b) {
    const uint8_t* keys = tile.block[b] + s.key_offset;
    float* to = s.shared_values + static_cast<int64_t>(b) * kLanes * s.head_dim;
    for (int32_t d = 0; d < s.head_dim; ++d) {
      alignas(64) float tokens[kLanes];
      Simd::store(tokens, Kv::key(keys, s.head_dim, d));
      for (int32_t t = 0; t < kLanes; ++t) to[t * static_cast<int64_t>(s.head_dim) + d] = tokens[t];
    }
  }
}

// Where turn_keys put them, as the values of a tile.
inline Tile turned_tile(const AttentionSplit& s, const Tile& tile) {
  Tile turned = tile;
  for (int32_t b = tile.lo; b < tile.hi; ++b) {
    turned.block[b] = turned.next[b] = turned.far[b] =
        reinterpret_cast<const uint8_t*>(s.shared_values + static_cast<int64_t>(b) * kLanes * s.head_dim);
  }
  return turned;
}

// kR rows through one tile.
template <class Kv, int kR>
void attend_float_rows(const AttentionSplit& s, const Tile& tile, int row) {
  const int64_t stride = kTileTokens + kLanes;
  int32_t from[kR], to[kR];
  for (int r = 0; r < kR; ++r) {
    from[r] = clip(s.first[row + r] - tile.start);
    to[r] = clip(s.last[row + r] - tile.start);
  }
  SharedRows<Kv, kR>::score_tile(s, tile, row, s.scores + row * stride, stride);
  for (int r = 0; r < kR; ++r) {
    if (from[r] < to[r]) softmax_row(s, row + r, from[r], to[r]);
  }
  if (s.shared_values == nullptr) {
    add_float_values<Kv, kR>(s, tile, row, from, to);
    return;
  }
  AttentionSplit values = s;
  values.value_offset = 0;
  values.head_bytes = static_cast<int64_t>(sizeof(float)) * kLanes * s.head_dim;
  add_float_values<KvFloat<LoadF32>, kR>(values, turned_tile(s, tile), row, from, to);
}

template <class Kv, int kR>
void attend_rows(const AttentionSplit& s, const Tile& tile, int row) {
  if constexpr (Kv::kIntegers) {
    attend_integer_rows<kR>(s, tile, row);
  } else {
    attend_float_rows<Kv, kR>(s, tile, row);
  }
}

template <class Kv>
void attend_tile(const AttentionSplit& s, const Tile& tile) {
  if constexpr (!Kv::kIntegers) {
    if (s.shared_values != nullptr) turn_keys<Kv>(s, tile);
  }
  int row = 0;
  constexpr int kMaxRows = kSharedRows<Kv>;
  for (; row + kMaxRows <= s.rows; row += kMaxRows) attend_rows<Kv, kMaxRows>(s, tile, row);
  if constexpr (kMaxRows > 4) {
    for (; row + 4 <= s.rows; row += 4) attend_rows<Kv, 4>(s, tile, row);
  }
  for (; row + 2 <= s.rows; row += 2) attend_rows<Kv, 2>(s, tile, row);
  if (row < s.rows) attend_rows<Kv, 1>(s, tile, row);
}

template <class Kv>
void attend(const AttentionSplit& s) {
  const bool loops_prefetch = kLoopsPrefetch<Kv> && (kAtOnce > 1 || s.rows >= kSharedRows<Kv>);
  if (s.heads == 1) {
    begin_rows(s);
    for_each_tile(s, loops_prefetch, [&](const Tile& tile) { attend_tile<Kv>(s, tile); });
    end_rows(s);
    return;
  }
  AttentionSplit heads[kMaxHeads];
  for (int32_t h = 0; h < s.heads; ++h) {
    heads[h] = head_of(s, h);
    begin_rows(heads[h]);
  }
  for_each_tile(s, loops_prefetch, [&](const Tile& tile) {
    for (int32_t h = 0; h < s.heads; ++h) attend_tile<Kv>(heads[h], tile);
  });
  for (int32_t h = 0; h < s.heads; ++h) end_rows(heads[h]);
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
