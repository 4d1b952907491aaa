// Attention over a BF16 cache by bf16 tiles of the AMX unit. Included inside the anonymous namespace of
// table_avx512.cpp, after kernels_amx.h and kernels_attention.h, whose walk over a span and softmax it uses.
//
// Keys and values are bf16 as they lie. Queries, and the weights that softmax gives, are float32: each is
// split into two bf16 numbers, its upper eight bits and the next eight, so that a product is right to 2^-17.
// Eight rows fill a tile, their upper parts in its first eight rows and the others in its last: one query
// token of a model with eight query heads per KV head. A row's sums depend on its own query, its visible
// range and absolute positions only: tokens that it does not see have the weight zero and add nothing.
//
// A tile of 64 tokens (of the span, kernels_attention.h): keys and values are interleaved into a scratch of
// 16 KiB as tile products want them, pairs of dimensions and pairs of tokens; that is one shuffle for every
// line, and done once for all rows. Lines of the next tile go from memory to the second-level cache during
// softmax, and from there to the first half a tile ahead. Where eight rows see a tile whole, most of decode,
// kernels_attention_amx_decode.h has another order of the same arithmetic.
//
// Roofline, per 64 tokens of 64 dimensions (16 KiB), in cycles: 256 shuffles; for eight rows 16 tile products
// of 16 each, and softmax, some 35 vector operations a row and 16 tokens. Memory at 3.7 bytes a cycle: 4,400.
#pragma once

constexpr int32_t kMostTileDim = 256;             // of a head
constexpr int32_t kMostSets = 4;                  // of them in a span: workspace.cpp makes tiles of 32 rows
constexpr int32_t kHalfTokens = kTileTokens / 2;  // the depth of a product with values

// Of a set of rows and a tile.
struct SetScratch {
  alignas(64) uint16_t weights[2][16][32];  // [half][row: upper, lower][tokens t, t + 16 in turn]
  alignas(64) float sums[4][16][16];
  alignas(64) float scores[kSetRows][kTileTokens];
};
struct AttendTiles : SetScratch {
  alignas(64) uint16_t keys[kTileTokens * kMostTileDim];  // [block][dims / 2][16 tokens][2 dims]
  alignas(
      64) uint16_t values[kTileTokens * kMostTileDim];  // [half][dims / 16][16][16 dims][tokens t, t + 16]
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

// A head's lines of the next tile, asked for into the second-level cache, a share with every step of softmax:
// among the loads of keys and values they would occupy the line buffers that those wait for.
struct NextLines {
  static constexpr int kSteps = 2 * kSetRows;
  const uint8_t* runs[2 * kTileTokens / kLanes];
  int32_t count = 0, at = 0;
  int64_t line = 0, bytes, share;  // bytes: of a run; share: of a step
  NextLines(const AttentionSplit& s, const Tile& tile) : bytes(s.head_bytes) {
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

// The keys of the tile's blocks; its values are asked for.
inline void pair_keys(const AttentionSplit& s, const Tile& tile, AttendTiles& t) {
  const V order = load512(kPairOrder.word);
  for (int32_t b = tile.lo; b < tile.hi; ++b) {
    const uint8_t* const from = tile.block[b] + s.key_offset;
    const auto* const values = reinterpret_cast<const char*>(tile.block[b] + s.value_offset);
    uint16_t* const to = t.keys + b * kLanes * s.head_dim;
    for (int64_t at = 0; at < s.head_bytes; at += 64) {
      _mm_prefetch(values + at, _MM_HINT_T0);
      _mm512_store_si512(to + at / 2, _mm512_permutexvar_epi16(order, load512(from + at)));
    }
  }
}

// 32 values of a token t and as many of token t + 16 to pairs: of each quarter i the dimensions 8 i ..
// 8 i + 3 to a row of one tile, 8 i + 4 .. 8 i + 7 to the next one's (dims_in_order puts the sums right).
// most: of all magnitudes, as bits.
[[gnu::always_inline]] inline void pair_value_line(V a, V b, uint16_t* to, V& most) {
  const V magnitude = _mm512_set1_epi16(0x7fff);
  most = _mm512_max_epu16(most,
                          _mm512_max_epu16(_mm512_and_si512(a, magnitude), _mm512_and_si512(b, magnitude)));
  _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
  _mm512_store_si512(to + kLanes * 32, _mm512_unpackhi_epi16(a, b));
}
[[gnu::always_inline]] inline bool are_numbers(V most) {
  return _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(0x7f80)) == 0;
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
  V most = _mm512_setzero_si512();
  uint16_t* const to = t.values + half * kHalfTokens * s.head_dim;
  for (int64_t token = 0; token < kLanes; ++token) {
    for (int64_t c = 0; c < groups / 2; ++c) {  // 32 dimensions
      const int64_t at = (token * groups / 2 + c) * line;
      for (int i = 0; i < 2; ++i) {
        _mm_prefetch(reinterpret_cast<const char*>(keys[i] + at), _MM_HINT_T0);
      }
      const V a = _mm512_maskz_mov_epi32(keep[0], load512(from[0] + at));
      const V b = _mm512_maskz_mov_epi32(keep[1], load512(from[1] + at));
      pair_value_line(a, b, to + (2 * c * kLanes + token) * 32, most);
    }
  }
  return are_numbers(most);
}

// Where a dimension lies in a row of sums.
inline int32_t place_of_dim(int32_t dim) {
  return dim / 32 * 32 + dim % 8 / 4 * kLanes + dim % 32 / 8 * 4 + dim % 4;
}
// The sums of a row from those places to their own.
inline void dims_in_order(float* values, int32_t dims) {
  for (int32_t c = 0; c < dims; c += 32) {
    const V16 low = Simd::load(values + c), high = Simd::load(values + c + kLanes);
    const V16 first = _mm512_shuffle_f32x4(low, high, 0x44), last = _mm512_shuffle_f32x4(low, high, 0xee);
    Simd::store(values + c, _mm512_shuffle_f32x4(first, first, 0xd8));
    Simd::store(values + c + kLanes, _mm512_shuffle_f32x4(last, last, 0xd8));
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
  stores_are_done();
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

// The rows of a set, and what each sees of the tile.
struct SetRows {
  int32_t row, count;  // of the span's
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
// see; earlier sums are rescaled where a row has a new largest score. The numbers of soften(), for eight rows
// side by side: one after the other each would wait for its own. keep: weights are also left in s.scores.
// beside(step), of 2 kSetRows steps: what else is done meanwhile.
template <bool kWhole, class Beside>
[[gnu::always_inline]] inline void soften_set(const AttentionSplit& s, const SetRows& set, bool keep,
                                              Beside& beside, SetScratch& t) {
  const V16 scale = Simd::broadcast(s.scale), never = Simd::broadcast(-__builtin_inff());
  const int64_t stride = kTileTokens + kLanes;
  V16 most[kSetRows];
  unroll<kSetRows>([&](auto r) __attribute__((always_inline)) {
    V16 score[4];
    unroll<4>([&](auto b) __attribute__((always_inline)) {
      score[b] = Simd::mul(Simd::add(Simd::load(t.sums[b][r]), Simd::load(t.sums[b][r + kSetRows])), scale);
      if constexpr (!kWhole) score[b] = _mm512_mask_mov_ps(never, set.lanes(r, b), score[b]);
      Simd::store(t.scores[r] + b * kLanes, score[b]);
    });
    most[r] = _mm512_max_ps(_mm512_max_ps(score[0], score[1]), _mm512_max_ps(score[2], score[3]));
    beside(r);
  });
  const auto seeing = static_cast<__mmask16>(set.seeing);
  const V16 before = _mm512_maskz_loadu_ps(first_lanes(set.count), s.row_max + set.row);
  const V16 now = _mm512_mask_max_ps(before, seeing, before, largest_of_eight(most));
  _mm512_mask_storeu_ps(s.row_max + set.row, seeing, now);
  const unsigned changed = set.seeing & _mm512_cmp_ps_mask(before, now, _CMP_NEQ_UQ);
  alignas(64) float largest[kLanes], factor[kLanes];
  Simd::store(largest, now);
  if (changed != 0) {
    Simd::store(factor, exp_below(Simd::sub(before, now)));
    for (int32_t r = 0; r < kSetRows; ++r) {
      if ((changed >> r & 1) == 0) continue;
      const V16 by = Simd::broadcast(factor[r]);
      float* values = s.acc + (set.row + r) * static_cast<int64_t>(s.padded_dim);
      float* lane_sums = s.scores + (set.row + r) * stride + kTileTokens;
      Simd::store(lane_sums, Simd::mul(Simd::load(lane_sums), by));
      for (int32_t c = 0; c < s.padded_dim; c += kLanes) {
        Simd::store(values + c, Simd::mul(Simd::load(values + c), by));
      }
    }
  }
  unroll<kSetRows>([&](auto r) __attribute__((always_inline)) {
    V16 weight[4];
    if (!kWhole && (set.seeing >> r & 1) == 0) {
      unroll<4>([&](auto b) { weight[b] = Simd::zero(); });
    } else {
      const V16 top = Simd::broadcast(largest[r]);
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

// values[r] += sum over the tile of weight * value, for the rows of a set that see some of it.
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

// Values that are no numbers may be a token's that nobody sees, and a weight of zero does not hide them:
// they leave the scratch, and reach the rows that do see them here.
[[gnu::noinline]] inline void take_out_values(int32_t dims, uint16_t* values) {
  for (int32_t i = 0; i < kTileTokens * dims; ++i) {
    if ((values[i] & 0x7f80) == 0x7f80) values[i] = 0;
  }
}
[[gnu::noinline]] inline void add_taken_out(const AttentionSplit& s, const Tile& tile, int32_t row,
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

inline void attend_tile_by_tiles(const AttentionSplit& s, const Tile& tile, const QueryWords* queries,
                                 AttendTiles& t) {
  NextLines next(s, tile);
  pair_keys(s, tile, t);
  stores_are_done();
  bool numbers = true;
  for (int32_t set = 0; set * kSetRows < s.rows; ++set) {
    const SetRows rows(s, tile, set * kSetRows);
    if (rows.seeing != 0) score_set(s, tile, queries, set, t);
    if (set == 0) {
      numbers = pair_values(s, tile, 0, t);
      numbers = pair_values(s, tile, 1, t) && numbers;
      if (!numbers) [[unlikely]]
        take_out_values(s.head_dim, t.values);
    }
    if (rows.seeing == 0) continue;
    rows.whole ? soften_set<true>(s, rows, !numbers, next, t) : soften_set<false>(s, rows, !numbers, next, t);
    stores_are_done();
    add_set(s, tile, rows, t);
    for (int32_t r = 0; r < rows.count && !numbers; ++r) {
      add_taken_out(s, tile, rows.row + r, rows.from[r], rows.to[r]);
    }
  }
}

#include "kernels/cpu/attention/decode_amx.h"

// Whether a span goes through tiles depends on the model alone.
void attend_by_tiles(const AttentionSplit& s) {
  if (s.head_dim % 32 != 0 || s.head_dim > kMostTileDim || s.rows > kMostSets * kSetRows) {
    attend<KvFloat<LoadBF16>>(s);
    return;
  }
  AttendTiles t;
  DecodeTiles decode;
  alignas(64) QueryWords queries[kMaxHeads * kMostSets * kMostTileDim / 32];
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
  stores_are_done();
  _tile_loadconfig(&config);
  const bool one_set = s.rows == kSetRows && s.head_dim == kDecodeDim;
  each_tile(s, true, [&](const Tile& tile) {
    if (one_set) {
      const SetRows rows(s, tile, 0);
      if (rows.whole) {
        decode_tile(s, heads, tile, rows, queries, decode);
        return;
      }
    }
    for (int32_t h = 0; h < s.heads; ++h) attend_tile_by_tiles(heads[h], tile, queries + h * each, t);
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
