// Attention over one span of a paged cache for the query rows that share a KV head: online softmax, a tile of
// 64 positions at a time. Included inside the anonymous namespace of every table, after kernels_float.h.
//
// A row's arithmetic depends on its own query, its own visible range and the tiles' absolute positions only,
// so rows are grouped freely (four at a time share each load of keys and values).
#pragma once

struct Tile {
  int32_t start;   // position of its first token
  int32_t lo, hi;  // blocks [lo, hi) of the tile that some row sees
  const uint8_t* block[kTileTokens / kLanes];
};

// scores[r][t] = q_r . k_t over one block, t < 16; keys are [head_dim][16].
template <class Load, int kR>
void score_block(const AttendSpan& s, int row, const uint8_t* keys, float* scores, int64_t stride) {
  const auto* k = reinterpret_cast<const typename Load::Stored*>(keys);
  V16 acc[kR];
  unroll<kR>([&](auto r) { acc[r] = Simd::zero(); });
  for (int32_t d = 0; d < s.head_dim; ++d) {
    const V16 key = Load::load(k + d * kLanes);
    unroll<kR>([&](auto r) { acc[r] = Simd::fma(key, Simd::broadcast(s.query[row + r][d]), acc[r]); });
  }
  const V16 scale = Simd::broadcast(s.scale);
  unroll<kR>([&](auto r) { Simd::store(scores + r * stride, Simd::mul(acc[r], scale)); });
}

// values[r][c..c+16) += sum over tokens [from, to) of the tile, in order, of weight * v.
template <class Load, int kR>
void add_values(const AttendSpan& s, const Tile& tile, int row, int32_t from, int32_t to) {
  const int64_t stride = kTileTokens + kLanes;
  const float* weights = s.scores + row * stride;
  for (int32_t c = 0; c < s.padded_dim; c += kLanes) {
    V16 acc[kR];
    float* values = s.values + row * static_cast<int64_t>(s.padded_dim) + c;
    unroll<kR>([&](auto r) { acc[r] = Simd::load(values + r * static_cast<int64_t>(s.padded_dim)); });
    for (int32_t t = from; t < to; ++t) {
      const auto* v = reinterpret_cast<const typename Load::Stored*>(tile.block[t / kLanes] + s.value_offset);
      const V16 value = Load::load(v + (t % kLanes) * static_cast<int64_t>(s.head_dim) + c);
      unroll<kR>(
          [&](auto r) { acc[r] = Simd::fma(value, Simd::broadcast(weights[r * stride + t]), acc[r]); });
    }
    unroll<kR>([&](auto r) { Simd::store(values + r * static_cast<int64_t>(s.padded_dim), acc[r]); });
  }
}

inline int32_t clip(int32_t x) { return x < 0 ? 0 : x > kTileTokens ? kTileTokens : x; }

// Scores of one row to weights exp(score - largest); the row's earlier sums are rescaled to the new largest.
// [from, to) are the row's tokens in this tile; the lane sums lie behind the row's scores.
inline void soften(const AttendSpan& s, int row, int32_t from, int32_t to) {
  float* scores = s.scores + row * static_cast<int64_t>(kTileTokens + kLanes);
  const float never = -__builtin_inff();
  const int32_t first = from / kLanes * kLanes, last = (to + kLanes - 1) / kLanes * kLanes;
  for (int32_t t = first; t < from; ++t) scores[t] = never;
  for (int32_t t = to; t < last; ++t) scores[t] = never;
  V16 most = Simd::load(scores + first);
  for (int32_t t = first + kLanes; t < last; t += kLanes) most = Simd::max(most, Simd::load(scores + t));
  const float tile_largest = Simd::largest(most);
  const float largest = s.largest[row] > tile_largest ? s.largest[row] : tile_largest;
  float keep[kLanes];
  Simd::store(keep, exp16(Simd::broadcast(s.largest[row] - largest)));
  float* lane_sums = scores + kTileTokens;
  V16 sums = Simd::mul(Simd::load(lane_sums), Simd::broadcast(keep[0]));
  for (int32_t t = first; t < last; t += kLanes) {
    const V16 weight = exp16(Simd::sub(Simd::load(scores + t), Simd::broadcast(largest)));
    Simd::store(scores + t, weight);
    sums = Simd::add(sums, weight);
  }
  Simd::store(lane_sums, sums);
  s.largest[row] = largest;
  float* values = s.values + row * static_cast<int64_t>(s.padded_dim);
  for (int32_t c = 0; c < s.padded_dim; c += kLanes) {
    Simd::store(values + c, Simd::mul(Simd::load(values + c), Simd::broadcast(keep[0])));
  }
}

// kR rows through one tile. Tokens that all of them see share loads; those before and after are taken row by
// row, so that every row adds its own tokens, and only those, in order.
template <class Load, int kR>
void attend_rows(const AttendSpan& s, const Tile& tile, int row) {
  const int64_t stride = kTileTokens + kLanes;
  int32_t from[kR], to[kR], all_from = 0, all_to = kTileTokens;
  for (int r = 0; r < kR; ++r) {
    from[r] = clip(s.first[row + r] - tile.start);
    to[r] = clip(s.last[row + r] - tile.start);
    all_from = from[r] > all_from ? from[r] : all_from;
    all_to = to[r] < all_to ? to[r] : all_to;
  }
  for (int32_t b = tile.lo; b < tile.hi; ++b) {
    score_block<Load, kR>(s, row, tile.block[b] + s.key_offset, s.scores + row * stride + b * kLanes, stride);
  }
  for (int r = 0; r < kR; ++r) {
    if (from[r] < to[r]) soften(s, row + r, from[r], to[r]);
  }
  if (all_from >= all_to) {
    for (int r = 0; r < kR; ++r) add_values<Load, 1>(s, tile, row + r, from[r], to[r]);
    return;
  }
  for (int r = 0; r < kR; ++r) {
    if (from[r] < all_from) add_values<Load, 1>(s, tile, row + r, from[r], all_from);
  }
  add_values<Load, kR>(s, tile, row, all_from, all_to);
  for (int r = 0; r < kR; ++r) {
    if (all_to < to[r]) add_values<Load, 1>(s, tile, row + r, all_to, to[r]);
  }
}

template <class Load>
void attend_tile(const AttendSpan& s, const Tile& tile) {
  int row = 0;
  for (; row + 4 <= s.rows; row += 4) attend_rows<Load, 4>(s, tile, row);
  for (; row + 2 <= s.rows; row += 2) attend_rows<Load, 2>(s, tile, row);
  if (row < s.rows) attend_rows<Load, 1>(s, tile, row);
}

template <class Load>
void attend(const AttendSpan& s) {
  int32_t first = INT32_MAX, last = 0;
  for (int r = 0; r < s.rows; ++r) {
    if (s.first[r] >= s.last[r]) continue;
    first = s.first[r] < first ? s.first[r] : first;
    last = s.last[r] > last ? s.last[r] : last;
    s.largest[r] = -__builtin_inff();
    Simd::store(s.scores + r * static_cast<int64_t>(kTileTokens + kLanes) + kTileTokens, Simd::zero());
    for (int32_t c = 0; c < s.padded_dim; c += kLanes) {
      Simd::store(s.values + r * static_cast<int64_t>(s.padded_dim) + c, Simd::zero());
    }
  }
  for (int32_t start = first / kTileTokens * kTileTokens; start < last; start += kTileTokens) {
    Tile tile{start, clip(first - start) / kLanes, (clip(last - start) + kLanes - 1) / kLanes, {}};
    for (int32_t b = tile.lo; b < tile.hi; ++b) {
      tile.block[b] = s.pool + s.table[start / kLanes + b] * s.block_bytes;
    }
    attend_tile<Load>(s, tile);
  }
  for (int r = 0; r < s.rows; ++r) {
    if (s.first[r] >= s.last[r]) continue;
    s.sum[r] = Simd::sum(Simd::load(s.scores + r * static_cast<int64_t>(kTileTokens + kLanes) + kTileTokens));
  }
}
