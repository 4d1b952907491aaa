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
// line, and done once for all rows. Lines are asked for on the way: from memory to the second-level cache two
// tiles ahead, from there to the first half a tile ahead.
//
// Roofline, per 64 tokens of 64 dimensions (16 KiB), in cycles: 256 shuffles; for eight rows 16 tile products
// of 16 each, and softmax, some 60 vector operations a row and 16 tokens. Memory at 3.7 bytes a cycle: 4,400.
#pragma once

constexpr int32_t kMostTileDim = 256;             // of a head
constexpr int32_t kSetRows = 8;                   // rows of queries that share a tile
constexpr int32_t kMostSets = 4;                  // of them in a span: workspace.cpp makes tiles of 32 rows
constexpr int32_t kHalfTokens = kTileTokens / 2;  // the depth of a product with values

struct AttendTiles {
  alignas(64) uint16_t keys[kTileTokens * kMostTileDim];  // [block][dims / 2][16 tokens][2 dims]
  alignas(
      64) uint16_t values[kTileTokens * kMostTileDim];  // [half][dims / 16][16][16 dims][tokens t, t + 16]
  alignas(64) uint16_t queries[kMostSets][kMostTileDim / 32][16][32];  // [set][32 dims][row: upper, lower]
  alignas(64) uint16_t weights[2][16][32];  // [half][row][tokens t, t + 16 in turn]
  alignas(64) float sums[4][16][16];
};

// A float as two bf16 numbers: the upper half of its bits as it is, and what that leaves, rounded.
struct Halves {
  V upper, lower;  // in the upper half of a dword; the rest is not zero
};
[[gnu::always_inline]] inline Halves split_float(V16 x) {
  const V upper = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN >> 15));
  const V16 left = Simd::sub(x, _mm512_castsi512_ps(upper));
  return {upper, _mm512_add_epi32(_mm512_castps_si512(left), _mm512_set1_epi32(0x8000))};
}

inline void split_queries(const AttendSpan& s, AttendTiles& t) {
  for (int32_t row = 0; row < (s.rows + kSetRows - 1) / kSetRows * kSetRows; ++row) {
    for (int32_t d = 0; d < s.head_dim; d += kLanes) {
      const auto to = t.queries[row / kSetRows][d / 32];
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

// The keys of the tile's blocks; its values are asked for, and the keys two tiles ahead (and one, behind a
// tile that nobody asked for).
inline void pair_keys(const AttendSpan& s, const Tile& tile, AttendTiles& t) {
  const V order = load512(kPairOrder.word);
  for (int32_t b = tile.lo; b < tile.hi; ++b) {
    const uint8_t* const from = tile.block[b] + s.key_offset;
    const auto* const values = reinterpret_cast<const char*>(tile.block[b] + s.value_offset);
    const auto* const far = reinterpret_cast<const char*>(tile.far[b] + s.key_offset);
    const auto* const next = reinterpret_cast<const char*>(tile.next[b] + s.key_offset);
    uint16_t* const to = t.keys + b * kLanes * s.head_dim;
    for (int64_t at = 0; at < s.head_bytes; at += 64) {
      if (tile.cold) _mm_prefetch(next + at, _MM_HINT_T1);
      _mm_prefetch(values + at, _MM_HINT_T0);
      _mm_prefetch(far + at, _MM_HINT_T1);
      _mm512_store_si512(to + at / 2, _mm512_permutexvar_epi16(order, load512(from + at)));
    }
  }
}

// The values of half a tile: of a line of one block and the same of the next, dimensions 8 i .. 8 i + 3 of
// each quarter i, then 8 i + 4 .. 8 i + 7 (dims_in_order puts the sums right). False: some value is no
// number.
inline bool pair_values(const AttendSpan& s, const Tile& tile, int32_t half, AttendTiles& t) {
  const int64_t groups = s.head_dim / kLanes, line = 64;
  const bool has[2] = {2 * half >= tile.lo && 2 * half < tile.hi,
                       2 * half + 1 >= tile.lo && 2 * half + 1 < tile.hi};
  if (!has[0] && !has[1]) return true;
  const int32_t first = 2 * half + (has[0] ? 0 : 1), second = 2 * half + (has[1] ? 1 : 0);
  const uint8_t* const from[2] = {tile.block[first] + s.value_offset, tile.block[second] + s.value_offset};
  const uint8_t* const keys[2] = {tile.next[first] + s.key_offset, tile.next[second] + s.key_offset};
  const uint8_t* const next[2] = {tile.next[first] + s.value_offset, tile.next[second] + s.value_offset};
  const uint8_t* const far[2] = {tile.far[first] + s.value_offset, tile.far[second] + s.value_offset};
  const __mmask16 keep[2] = {static_cast<__mmask16>(has[0] ? 0xffff : 0),
                             static_cast<__mmask16>(has[1] ? 0xffff : 0)};
  V most = _mm512_setzero_si512();
  const V magnitude = _mm512_set1_epi16(0x7fff);
  uint16_t* const to = t.values + half * kHalfTokens * s.head_dim;
  for (int64_t token = 0; token < kLanes; ++token) {
    for (int64_t c = 0; c < groups / 2; ++c) {  // 32 dimensions
      const int64_t at = (token * groups / 2 + c) * line;
      for (int i = 0; i < 2; ++i) {
        _mm_prefetch(reinterpret_cast<const char*>(keys[i] + at), _MM_HINT_T0);
        if (tile.cold) _mm_prefetch(reinterpret_cast<const char*>(next[i] + at), _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(far[i] + at), _MM_HINT_T1);
      }
      const V a = _mm512_maskz_mov_epi32(keep[0], load512(from[0] + at));
      const V b = _mm512_maskz_mov_epi32(keep[1], load512(from[1] + at));
      most = _mm512_max_epu16(
          most, _mm512_max_epu16(_mm512_and_si512(a, magnitude), _mm512_and_si512(b, magnitude)));
      uint16_t* const pair = to + (2 * c * kLanes + token) * 32;
      _mm512_store_si512(pair, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(pair + kLanes * 32, _mm512_unpackhi_epi16(a, b));
    }
  }
  return _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(0x7f80)) == 0;
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
  if constexpr (kTile == 0) {
    _tile_loadd(5, b, 64);
    _tile_dpbf16ps(0, 4, 5);
  } else if constexpr (kTile == 1) {
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(1, 4, 6);
  } else if constexpr (kTile == 2) {
    _tile_loadd(5, b, 64);
    _tile_dpbf16ps(2, 4, 5);
  } else {
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(3, 4, 6);
  }
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

// scores[r][t] of a set of rows over the tile's blocks.
inline void score_set(const AttendSpan& s, const Tile& tile, int32_t set, int32_t rows, AttendTiles& t) {
  zero_sums();
  for (int32_t k = 0; k < s.head_dim / 32; ++k) {
    _tile_loadd(4, t.queries[set][k], 64);
    unroll<4>([&](auto b) __attribute__((always_inline)) {
      if (b >= tile.lo && b < tile.hi) bf16_product<b>(t.keys + (b * s.head_dim + 32 * k) * kLanes);
    });
  }
  store_tile_sums(t.sums);
  const V16 scale = Simd::broadcast(s.scale);
  for (int32_t r = 0; r < rows; ++r) {
    float* to = s.scores + (set * kSetRows + r) * static_cast<int64_t>(kTileTokens + kLanes);
    for (int32_t b = tile.lo; b < tile.hi; ++b) {
      const V16 score = Simd::add(Simd::load(t.sums[b][r]), Simd::load(t.sums[b][r + kSetRows]));
      Simd::store(to + b * kLanes, Simd::mul(score, scale));
    }
  }
}

// The weights of a row's tokens [from, to) of the tile as rows of tiles; zero elsewhere.
inline void split_weights(const float* scores, int32_t from, int32_t to, int32_t r, AttendTiles& t) {
  const auto weights = [&](int32_t block) {
    const bool seen = from < to && block * kLanes < to && (block + 1) * kLanes > from;
    return seen ? Simd::load(scores + block * kLanes) : Simd::zero();
  };
  for (int32_t half = 0; half < 2; ++half) {
    const Halves a = split_float(weights(2 * half)), b = split_float(weights(2 * half + 1));
    const auto both = [](V first, V second) {
      return blend_bits(_mm512_srli_epi32(first, 16), second, 0xffff0000ffff0000);
    };
    _mm512_store_si512(t.weights[half][r], both(a.upper, b.upper));
    _mm512_store_si512(t.weights[half][r + kSetRows], both(a.lower, b.lower));
  }
}

// values[r] += sum over the tile of weight * value, for the rows of a set that see some of it.
inline void add_set(const AttendSpan& s, const Tile& tile, int32_t set, int32_t rows, unsigned seeing,
                    AttendTiles& t) {
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
    store_tile_sums(t.sums);
    for (int32_t r = 0; r < rows; ++r) {
      if ((seeing >> r & 1) == 0) continue;
      float* to = s.values + (set * kSetRows + r) * static_cast<int64_t>(s.padded_dim) + first * kLanes;
      for (int32_t i = 0; i < 4 && first + i < groups; ++i) {
        const V16 sum = Simd::add(Simd::load(t.sums[i][r]), Simd::load(t.sums[i][r + kSetRows]));
        Simd::store(to + i * kLanes, Simd::add(Simd::load(to + i * kLanes), sum));
      }
    }
  }
}

// Values that are no numbers may be a token's that nobody sees, and a weight of zero does not hide them:
// they leave the scratch, and reach the rows that do see them here.
[[gnu::noinline]] inline void take_out_values(int32_t dims, AttendTiles& t) {
  for (int32_t i = 0; i < kTileTokens * dims; ++i) {
    if ((t.values[i] & 0x7f80) == 0x7f80) t.values[i] = 0;
  }
}
[[gnu::noinline]] inline void add_taken_out(const AttendSpan& s, const Tile& tile, int32_t row, int32_t from,
                                            int32_t to) {
  const float* weights = s.scores + row * static_cast<int64_t>(kTileTokens + kLanes);
  for (int32_t token = from; token < to; ++token) {
    const auto* values = reinterpret_cast<const uint16_t*>(tile.block[token / kLanes] + s.value_offset) +
                         token % kLanes * static_cast<int64_t>(s.head_dim);
    for (int32_t d = 0; d < s.head_dim; ++d) {
      if ((values[d] & 0x7f80) != 0x7f80) continue;
      const uint32_t bits = static_cast<uint32_t>(values[d]) << 16;
      float value;
      __builtin_memcpy(&value, &bits, 4);
      s.values[row * static_cast<int64_t>(s.padded_dim) + place_of_dim(d)] += weights[token] * value;
    }
  }
}

inline void attend_tile_by_tiles(const AttendSpan& s, const Tile& tile, AttendTiles& t) {
  pair_keys(s, tile, t);
  stores_are_done();
  bool numbers = true;
  for (int32_t set = 0; set * kSetRows < s.rows; ++set) {
    const int32_t row = set * kSetRows, rows = s.rows - row < kSetRows ? s.rows - row : kSetRows;
    int32_t from[kSetRows] = {}, to[kSetRows] = {};
    unsigned seeing = 0;
    for (int32_t r = 0; r < rows; ++r) {
      from[r] = clip(s.first[row + r] - tile.start);
      to[r] = clip(s.last[row + r] - tile.start);
      seeing |= static_cast<unsigned>(from[r] < to[r]) << r;
    }
    if (seeing != 0) score_set(s, tile, set, rows, t);
    if (set == 0) {
      numbers = pair_values(s, tile, 0, t);
      numbers = pair_values(s, tile, 1, t) && numbers;
      if (!numbers) [[unlikely]]
        take_out_values(s.head_dim, t);
    }
    if (seeing == 0) continue;
    for (int32_t r = 0; r < kSetRows; ++r) {
      if (from[r] < to[r]) soften(s, row + r, from[r], to[r]);
      split_weights(s.scores + (row + (r < rows ? r : 0)) * static_cast<int64_t>(kTileTokens + kLanes),
                    from[r], to[r], r, t);
    }
    stores_are_done();
    add_set(s, tile, set, rows, seeing, t);
    for (int32_t r = 0; r < rows && !numbers; ++r) add_taken_out(s, tile, row + r, from[r], to[r]);
  }
}

// Whether a span goes through tiles depends on the model alone.
void attend_by_tiles(const AttendSpan& s) {
  if (s.head_dim % 32 != 0 || s.head_dim > kMostTileDim || s.rows > kMostSets * kSetRows) {
    attend<KvFloat<LoadBF16>>(s);
    return;
  }
  AttendTiles t;
  split_queries(s, t);
  begin_rows(s);
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  stores_are_done();
  _tile_loadconfig(&config);
  each_tile(s, [&](const Tile& tile) { attend_tile_by_tiles(s, tile, t); });
  _tile_release();
  end_rows(s);
  for (int32_t r = 0; r < s.rows; ++r) {
    if (s.first[r] < s.last[r]) dims_in_order(s.values + r * static_cast<int64_t>(s.padded_dim), s.head_dim);
  }
}
