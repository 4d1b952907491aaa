// Attention over a BF16 cache by bf16 tiles of the AMX unit (tiles_amx.h has the arithmetic): the entry, and
// the order of the work for any number of rows.
//
// Keys and values are bf16 as they lie. Queries, and the weights that softmax gives, are float32: each is
// split into two bf16 numbers, its upper eight bits and the next eight, so that a product is right to 2^-17.
// Eight rows fill a tile, their upper parts in its first eight rows and the others in its last: one query
// token of a model with eight query heads per KV head. A row's sums depend on its own query, its visible
// range and absolute positions only: tokens that it does not see have the weight zero and add nothing.
//
// A tile of 64 tokens (of the split, kv_tiles.h): keys and values are interleaved into a scratch of 16 KiB as
// tile products want them, pairs of dimensions and pairs of tokens; that is one shuffle for every line, and
// done once for all rows. Lines of the next tile go from memory to the second-level cache during softmax, and
// from there to the first half a tile ahead. Where eight rows see a tile whole, most of decode, decode_amx.h
// has another order of the same arithmetic.
//
// Roofline, per 64 tokens of 64 dimensions (16 KiB), in cycles: 256 shuffles; for eight rows 16 tile products
// of 16 each, and softmax, some 35 vector operations a row and 16 tokens. Memory at 3.7 bytes a cycle: 4,400.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/cpu/attention/decode_amx.h"
#include "kernels/cpu/attention/kv_tiles.h"
#include "kernels/cpu/attention/paged.h"
#include "kernels/cpu/attention/tiles_amx.h"
#include "kernels/cpu/simd/amx.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/unroll.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// A head's lines of the next tile, prefetched into the second-level cache, a share with every step of
// softmax: among the loads of keys and values they would occupy the line buffers that those wait for.
struct NextTilePrefetch {
  static constexpr int kSteps = 2 * kSetRows;
  const uint8_t* runs[2 * kTileTokens / kLanes];
  int32_t count = 0, at = 0;
  int64_t line = 0, bytes, share;  // bytes: of a run; share: of a step
  NextTilePrefetch(const AttentionSplit& s, const Tile& tile) : bytes(s.head_bytes) {
    for (int32_t b = tile.lo; b < tile.hi; ++b) {
      runs[count++] = tile.next[b] + s.key_offset;
      runs[count++] = tile.next[b] + s.value_offset;
    }
    share = (count * bytes / kSteps + 63) / 64 * 64;
  }
  [[gnu::always_inline]] void operator()(int) {
    for (int64_t left = share; left > 0 && at < count;) {
      const int64_t some = bytes - line < left ? bytes - line : left;
      const auto* from = reinterpret_cast<const char*>(runs[at] + line);
      for (int64_t i = 0; i < some; i += 64) _mm_prefetch(from + i, _MM_HINT_T1);
      left -= some;
      line += some;
      if (line < bytes) continue;
      line = 0;
      ++at;
    }
  }
};

// The keys of the tile's blocks; its values are prefetched.
inline void pair_keys(const AttentionSplit& s, const Tile& tile, AttendTiles& t) {
  const V order = load_bytes(kPairOrder.word);
  for (int32_t b = tile.lo; b < tile.hi; ++b) {
    const uint8_t* const from = tile.block[b] + s.key_offset;
    const auto* const values = reinterpret_cast<const char*>(tile.block[b] + s.value_offset);
    uint16_t* const to = t.keys + b * kLanes * s.head_dim;
    for (int64_t at = 0; at < s.head_bytes; at += 64) {
      _mm_prefetch(values + at, _MM_HINT_T0);
      _mm512_store_si512(to + at / 2, _mm512_permutexvar_epi16(order, load_bytes(from + at)));
    }
  }
}

// The values of half a tile. False: some value is no number.
inline bool pair_values(const AttentionSplit& s, const Tile& tile, int32_t half, AttendTiles& t) {
  const int64_t groups = s.head_dim / kLanes, line = 64;
  const bool has[2] = {2 * half >= tile.lo && 2 * half < tile.hi,
                       2 * half + 1 >= tile.lo && 2 * half + 1 < tile.hi};
  if (!has[0] && !has[1]) return true;
  const int32_t first = 2 * half + (has[0] ? 0 : 1), second = 2 * half + (has[1] ? 1 : 0);
  const uint8_t* const from[2] = {tile.block[first] + s.value_offset, tile.block[second] + s.value_offset};
  const uint8_t* const keys[2] = {tile.next[first] + s.key_offset, tile.next[second] + s.key_offset};
  const __mmask16 keep[2] = {static_cast<__mmask16>(has[0] ? 0xffff : 0),
                             static_cast<__mmask16>(has[1] ? 0xffff : 0)};
  V magnitudes = _mm512_setzero_si512();
  uint16_t* const to = t.values + half * kHalfTokens * s.head_dim;
  for (int64_t token = 0; token < kLanes; ++token) {
    for (int64_t c = 0; c < groups / 2; ++c) {  // 32 dimensions
      const int64_t at = (token * groups / 2 + c) * line;
      for (int i = 0; i < 2; ++i) {
        _mm_prefetch(reinterpret_cast<const char*>(keys[i] + at), _MM_HINT_T0);
      }
      const V a = _mm512_maskz_mov_epi32(keep[0], load_bytes(from[0] + at));
      const V b = _mm512_maskz_mov_epi32(keep[1], load_bytes(from[1] + at));
      pair_value_line(a, b, to + (2 * c * kLanes + token) * 32, magnitudes);
    }
  }
  return all_finite(magnitudes);
}

// The sums of scores of a set of rows over the tile's blocks.
inline void score_set(const AttentionSplit& s, const Tile& tile, const QueryWords* queries, int32_t set,
                      AttendTiles& t) {
  zero_sums();
  for (int32_t k = 0; k < s.head_dim / 32; ++k) {
    _tile_loadd(4, queries[set * s.head_dim / 32 + k], 64);
    unroll<4>([&](auto b) __attribute__((always_inline)) {
      if (b >= tile.lo && b < tile.hi) bf16_product<b>(t.keys + (b * s.head_dim + 32 * k) * kLanes);
    });
  }
  store_tile_sums(t.sums);
}

// acc[r] += sum over the tile of weight * value, for the rows of a set that see some of it.
inline void add_set(const AttentionSplit& s, const Tile& tile, const SetRows& set, AttendTiles& t) {
  const int32_t groups = s.head_dim / kLanes;
  for (int32_t first = 0; first < groups; first += 4) {
    zero_sums();
    for (int32_t half = 0; half < 2; ++half) {
      if (tile.hi <= 2 * half || tile.lo >= 2 * half + 2) continue;
      _tile_loadd(4, t.weights[half], 64);
      unroll<4>([&](auto i) __attribute__((always_inline)) {
        if (first + i < groups) bf16_product<i>(t.values + (half * groups + first + i) * kLanes * 32);
      });
    }
    add_sums(s, set, first, groups - first, t);
  }
}

inline void attend_tile_amx(const AttentionSplit& s, const Tile& tile, const QueryWords* queries,
                            AttendTiles& t) {
  NextTilePrefetch next(s, tile);
  pair_keys(s, tile, t);
  compiler_fence();
  bool finite = true;
  for (int32_t set = 0; set * kSetRows < s.rows; ++set) {
    const SetRows rows(s, tile, set * kSetRows);
    if (rows.seeing != 0) score_set(s, tile, queries, set, t);
    if (set == 0) {
      finite = pair_values(s, tile, 0, t);
      finite = pair_values(s, tile, 1, t) && finite;
      if (!finite) [[unlikely]]
        zero_nonfinite_values(s.head_dim, t.values);
    }
    if (rows.seeing == 0) continue;
    rows.whole ? softmax_set<true>(s, rows, !finite, next, t) : softmax_set<false>(s, rows, !finite, next, t);
    compiler_fence();
    add_set(s, tile, rows, t);
    for (int32_t r = 0; r < rows.count && !finite; ++r) {
      add_nonfinite_values(s, tile, rows.row + r, rows.from[r], rows.to[r]);
    }
  }
}

// Whether a split goes through tiles or kPlain depends on the model alone.
template <AttentionFn kPlain>
void attend_amx(const AttentionSplit& s) {
  if (s.shared_values != nullptr || s.head_dim % 32 != 0 || s.head_dim > kMaxTileDim ||
      s.rows > kMaxSets * kSetRows) {
    kPlain(s);
    return;
  }
  AttendTiles t;
  DecodeTiles decode;
  alignas(64) QueryWords queries[kMaxHeads * kMaxSets * kMaxTileDim / 32];
  const int32_t each = (s.rows + kSetRows - 1) / kSetRows * s.head_dim / 32;  // of them a head
  AttentionSplit heads[kMaxHeads];
  for (int32_t h = 0; h < s.heads; ++h) {
    heads[h] = head_of(s, h);
    split_queries(heads[h], queries + h * each);
    begin_rows(heads[h]);
  }
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  compiler_fence();
  _tile_loadconfig(&config);
  const bool one_set = s.rows == kSetRows && s.head_dim == kDecodeDim;
  for_each_tile(s, true, [&](const Tile& tile) {
    if (one_set) {
      const SetRows rows(s, tile, 0);
      if (rows.whole) {
        decode_tile(s, heads, tile, rows, queries, decode);
        return;
      }
    }
    for (int32_t h = 0; h < s.heads; ++h) attend_tile_amx(heads[h], tile, queries + h * each, t);
  });
  _tile_release();
  for (int32_t h = 0; h < s.heads; ++h) {
    end_rows(heads[h]);
    for (int32_t r = 0; r < s.rows; ++r) {
      if (s.first[r] >= s.last[r]) continue;
      dims_in_order(heads[h].acc + r * static_cast<int64_t>(s.padded_dim), s.head_dim);
    }
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
