// Attention over one span of a paged cache for the query rows that share a KV head: online softmax, a tile of
// 64 positions at a time. Included inside the anonymous namespace of every table, after kernels_float.h.
//
// A row's arithmetic depends on its own query, its own visible range and the tiles' absolute positions only,
// so rows are grouped freely (four or eight at a time share each load of keys and values).
#pragma once

// Blocks or sixteens of dimensions at once.
constexpr int kAtOnce = Simd::kAttendAtOnce;

struct Tile {
  int32_t start;   // position of its first token
  int32_t lo, hi;  // blocks [lo, hi) of the tile that some row sees
  const uint8_t* block[kTileTokens / kLanes];
  const uint8_t* next[kTileTokens / kLanes];  // blocks of the tile behind, to be asked for; or this one's
  const uint8_t* far[kTileTokens / kLanes];   // of the tile behind that
  bool cold = false;                          // the first of a span that nobody asked for
};

// How a cache is read: key() gives dimension d of a block's 16 tokens, value() dimensions [c, c + 16) of one.
template <class Load>
struct KvFloat {
  static constexpr bool kIntegers = false;
  using Stored = typename Load::Stored;
  static V16 key(const uint8_t* head, int32_t, int32_t d) {
    return Load::load(reinterpret_cast<const Stored*>(head) + d * kLanes);
  }
  static V16 value(const uint8_t* head, int32_t dim, int32_t token, int32_t c) {
    return Load::load(reinterpret_cast<const Stored*>(head) + token * static_cast<int64_t>(dim) + c);
  }
};

// 16 bytes to floats by way of memory, for a Simd that has no better way.
template <class S, class Convert>
V16 widen16(const uint8_t* p, Convert convert) {
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = convert(p[i]);
  return S::load(wide);
}
template <class S>
V16 load_e4m3(const uint8_t* p) {
  if constexpr (requires { S::widen_e4m3(p); }) {
    return S::widen_e4m3(p);
  } else {
    return widen16<S>(p, [](uint8_t x) {
      const uint32_t magnitude = x & 0x7fu, sign = (x & 0x80u) << 24;
      // Seen as the exponent and fraction of a float, e4m3 is too small by 2^120.
      uint32_t bits = magnitude == 0x7fu ? 0x7fc00000u : magnitude << 20;
      float value;
      __builtin_memcpy(&value, &bits, 4);
      value *= 0x1p120f;
      __builtin_memcpy(&bits, &value, 4);
      bits |= sign;
      __builtin_memcpy(&value, &bits, 4);
      return value;
    });
  }
}

struct KvFp8 {  // e8m0 scales [16], then the codes
  static constexpr bool kIntegers = false;
  static float scale(uint8_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 23;
    float value;
    __builtin_memcpy(&value, &wide, 4);
    return value;
  }
  static V16 key(const uint8_t* head, int32_t, int32_t d) {
    return Simd::mul(load_e4m3<Simd>(head + kLanes + d * kLanes), widen16<Simd>(head, scale));
  }
  static V16 value(const uint8_t* head, int32_t dim, int32_t token, int32_t c) {
    return Simd::mul(load_e4m3<Simd>(head + kLanes + token * static_cast<int64_t>(dim) + c),
                     Simd::broadcast(scale(head[token])));
  }
};

// What kR rows share: loads of keys and of values. kWide blocks, or sixteens of dimensions, are taken at once
// where there are registers for it: a row's factor is then loaded once for all of them.
template <class Kv, int kR>
struct SharedRows {
  // scores[r][t] = q_r . k_t over kWide blocks, t < 16 each; keys are [head_dim][16].
  template <int kWide>
  static void score_blocks(const AttentionSplit& s, int row, const Tile& tile, int32_t b, float* scores,
                           int64_t stride) {
    [[maybe_unused]] const int64_t bytes = s.head_bytes / s.head_dim;  // of a dimension of sixteen keys
    V16 acc[kWide][kR];
    unroll<kWide>([&](auto w) { unroll<kR>([&](auto r) { acc[w][r] = Simd::zero(); }); });
    const uint8_t *keys[kWide], *next[kWide], *far[kWide];
    unroll<kWide>([&](auto w) {
      keys[w] = tile.block[b + w] + s.key_offset;
      next[w] = tile.next[b + w] + s.key_offset;
      far[w] = tile.far[b + w] + s.key_offset;
    });
    for (int32_t d = 0; d < s.head_dim; ++d) {
      V16 key[kWide];
      if constexpr (kAtOnce > 1) {
        // From memory to the second-level cache a tile before it goes on to the first: that level has too few
        // line buffers for a core's share of the bandwidth. Two dimensions of BF16 are a line.
        for (int w = 0; w < kWide; ++w) {
          if (d % 2 == 0 || bytes > 32) __builtin_prefetch(next[w] + d * bytes, 0, 3);
          if (d % 2 != 0 || bytes > 32) __builtin_prefetch(far[w] + d * bytes, 0, 2);
        }
      }
      unroll<kWide>([&](auto w) { key[w] = Kv::key(keys[w], s.head_dim, d); });
      unroll<kR>([&](auto r) {
        const V16 q = Simd::broadcast(s.query[row + r][d]);
        unroll<kWide>([&](auto w) { acc[w][r] = Simd::fma(key[w], q, acc[w][r]); });
      });
    }
    const V16 scale = Simd::broadcast(s.scale);
    unroll<kWide>([&](auto w) {
      unroll<kR>([&](auto r) { Simd::store(scores + r * stride + w * kLanes, Simd::mul(acc[w][r], scale)); });
    });
  }

  // values[r][c..c+16 kWide) += sum over tokens [from, to) of the tile, in order, of weight * v.
  template <int kWide>
  static void add_dims(const AttentionSplit& s, const Tile& tile, int row, int32_t from, int32_t to,
                       int32_t c) {
    const int64_t stride = kTileTokens + kLanes, dim = s.padded_dim;
    // A token's values, and where these dimensions begin in the next tile.
    [[maybe_unused]] const int64_t bytes = s.head_bytes / kLanes, next = s.value_offset + c * bytes / dim;
    const float* weights = s.scores + row * stride;
    V16 acc[kWide][kR];
    float* values = s.acc + row * dim + c;
    unroll<kWide>(
        [&](auto w) { unroll<kR>([&](auto r) { acc[w][r] = Simd::load(values + r * dim + w * kLanes); }); });
    for (int32_t t = from; t < to; ++t) {
      const uint8_t* head = tile.block[t / kLanes] + s.value_offset;
      if constexpr (kAtOnce > 1) {
        __builtin_prefetch(tile.next[t / kLanes] + next + t % kLanes * bytes, 0, 3);
        __builtin_prefetch(tile.far[t / kLanes] + next + t % kLanes * bytes, 0, 2);
      }
      V16 value[kWide];
      unroll<kWide>([&](auto w) { value[w] = Kv::value(head, s.head_dim, t % kLanes, c + w * kLanes); });
      unroll<kR>([&](auto r) {
        const V16 weight = Simd::broadcast(weights[r * stride + t]);
        unroll<kWide>([&](auto w) { acc[w][r] = Simd::fma(value[w], weight, acc[w][r]); });
      });
    }
    unroll<kWide>(
        [&](auto w) { unroll<kR>([&](auto r) { Simd::store(values + r * dim + w * kLanes, acc[w][r]); }); });
  }

  static void score_tile(const AttentionSplit& s, const Tile& tile, int row, float* scores, int64_t stride) {
    int32_t b = tile.lo;
    if constexpr (kAtOnce > 1) {
      for (; b + kAtOnce <= tile.hi; b += kAtOnce) {
        score_blocks<kAtOnce>(s, row, tile, b, scores + b * kLanes, stride);
      }
    }
    for (; b < tile.hi; ++b) score_blocks<1>(s, row, tile, b, scores + b * kLanes, stride);
  }
  static void add_values(const AttentionSplit& s, const Tile& tile, int row, int32_t from, int32_t to) {
    int32_t c = 0;
    if constexpr (kAtOnce > 1) {
      for (; c + kAtOnce * kLanes <= s.padded_dim; c += kAtOnce * kLanes) {
        add_dims<kAtOnce>(s, tile, row, from, to, c);
      }
    }
    for (; c < s.padded_dim; c += kLanes) add_dims<1>(s, tile, row, from, to, c);
  }
};

// How many rows share loads: sixteen registers of sums where registers hold four floats.
template <class Kv>
inline constexpr int kSharedRows = Simd::kAttendRows;
// Whether loops over so many rows ask for the next tile's lines, a few with every step.
template <class Kv>
inline constexpr bool kLoopsAsk = kAtOnce > 1;

#if defined(__ARM_FEATURE_DOTPROD)
#include "kernels/cpu/attention/paged_neon.h"
#endif

inline int32_t clip(int32_t x) { return x < 0 ? 0 : x > kTileTokens ? kTileTokens : x; }

// What a row has summed up so far, lane sums behind its scores and values, times exp(by).
[[gnu::noinline]] inline void rescale(const AttentionSplit& s, int row, float by) {
  float keep[kLanes];
  Simd::store(keep, exp16_below(Simd::broadcast(by)));
  const V16 factor = Simd::broadcast(keep[0]);
  float* sums = s.scores + row * static_cast<int64_t>(kTileTokens + kLanes) + kTileTokens;
  Simd::store(sums, Simd::mul(Simd::load(sums), factor));
  float* values = s.acc + row * static_cast<int64_t>(s.padded_dim);
  for (int32_t c = 0; c < s.padded_dim; c += kLanes) {
    Simd::store(values + c, Simd::mul(Simd::load(values + c), factor));
  }
}

// Scores of one row to weights exp(score - largest); the row's earlier sums are rescaled to the new largest.
// [from, to) are the row's tokens in this tile; the lane sums lie behind the row's scores.
template <class Exp = FullExp>
void soften(const AttentionSplit& s, int row, int32_t from, int32_t to) {
  float* scores = s.scores + row * static_cast<int64_t>(kTileTokens + kLanes);
  const float never = -__builtin_inff();
  const int32_t first = from / kLanes * kLanes, last = (to + kLanes - 1) / kLanes * kLanes;
  for (int32_t t = first; t < from; ++t) scores[t] = never;
  for (int32_t t = to; t < last; ++t) scores[t] = never;
  V16 most = Simd::load(scores + first);
  for (int32_t t = first + kLanes; t < last; t += kLanes) most = Simd::max(most, Simd::load(scores + t));
  const float tile_largest = Simd::largest(most);
  const float largest = s.row_max[row] > tile_largest ? s.row_max[row] : tile_largest;
  float* lane_sums = scores + kTileTokens;
  // Mostly the largest is an old one, and everything would be multiplied by exactly one.
  if (!(s.row_max[row] == largest && largest > never)) rescale(s, row, s.row_max[row] - largest);
  V16 sums = Simd::load(lane_sums);
  for (int32_t t = first; t < last; t += kLanes) {
    const V16 weight = exp16_below<Exp>(Simd::sub(Simd::load(scores + t), Simd::broadcast(largest)));
    Simd::store(scores + t, weight);
    sums = Simd::add(sums, weight);
  }
  Simd::store(lane_sums, sums);
  s.row_max[row] = largest;
}

#if defined(MILLRACE_SIMD_AVX512)
#include "kernels/cpu/attention/paged_avx512.h"
#endif
//
#include "kernels/cpu/attention/paged_int8.h"

// kR rows through one tile. Tokens that all of them see share loads; those before and after are taken row by
// row, so that every row adds its own tokens, and only those, in order.
template <class Kv, int kR>
void attend_float_rows(const AttentionSplit& s, const Tile& tile, int row) {
  const int64_t stride = kTileTokens + kLanes;
  int32_t from[kR], to[kR], all_from = 0, all_to = kTileTokens;
  for (int r = 0; r < kR; ++r) {
    from[r] = clip(s.first[row + r] - tile.start);
    to[r] = clip(s.last[row + r] - tile.start);
    all_from = from[r] > all_from ? from[r] : all_from;
    all_to = to[r] < all_to ? to[r] : all_to;
  }
  SharedRows<Kv, kR>::score_tile(s, tile, row, s.scores + row * stride, stride);
  for (int r = 0; r < kR; ++r) {
    if (from[r] < to[r]) soften(s, row + r, from[r], to[r]);
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
  int row = 0;
  constexpr int kMost = kSharedRows<Kv>;
  for (; row + kMost <= s.rows; row += kMost) attend_rows<Kv, kMost>(s, tile, row);
  if constexpr (kMost > 4) {
    for (; row + 4 <= s.rows; row += 4) attend_rows<Kv, 4>(s, tile, row);
  }
  for (; row + 2 <= s.rows; row += 2) attend_rows<Kv, 2>(s, tile, row);
  if (row < s.rows) attend_rows<Kv, 1>(s, tile, row);
}

// The keys and values of a block, of all heads.
[[gnu::always_inline]] inline void ask_block(const AttentionSplit& s, const uint8_t* block) {
  for (int64_t at = 0; at < s.heads * s.head_bytes; at += 64) {
    __builtin_prefetch(block + s.key_offset + at, 0, 2);
    __builtin_prefetch(block + s.value_offset + at, 0, 2);
  }
}

// Rows that see something of the span begin with nothing.
inline void begin_rows(const AttentionSplit& s) {
  for (int r = 0; r < s.rows; ++r) {
    if (s.first[r] >= s.last[r]) continue;
    s.row_max[r] = -__builtin_inff();
    Simd::store(s.scores + r * static_cast<int64_t>(kTileTokens + kLanes) + kTileTokens, Simd::zero());
    for (int32_t c = 0; c < s.padded_dim; c += kLanes) {
      Simd::store(s.acc + r * static_cast<int64_t>(s.padded_dim) + c, Simd::zero());
    }
  }
}
inline void end_rows(const AttentionSplit& s) {
  for (int r = 0; r < s.rows; ++r) {
    if (s.first[r] >= s.last[r]) continue;
    s.row_sum[r] =
        Simd::sum(Simd::load(s.scores + r * static_cast<int64_t>(kTileTokens + kLanes) + kTileTokens));
  }
}

// What head h of a span has for itself.
inline AttentionSplit head_of(const AttentionSplit& s, int32_t h) {
  AttentionSplit head = s;
  const int64_t row = h * s.head_rows;
  head.key_offset += h * s.head_bytes;
  head.value_offset += h * s.head_bytes;
  head.query += h * s.rows;
  head.query_blocks += h * s.rows;
  head.row_max += row;
  head.row_sum += row;
  head.acc += row * s.padded_dim;
  head.scores += h * static_cast<int64_t>(s.rows) * (kTileTokens + kLanes);
  return head;
}

// attend_one(tile) for the tiles of a span, in order. loops_ask: attend_one asks for the lines of tile.next.
template <class AttendOne>
[[gnu::always_inline]] inline void each_tile(const AttentionSplit& s, bool loops_ask,
                                             const AttendOne& attend_one) {
  int32_t first = INT32_MAX, last = 0;
  for (int r = 0; r < s.rows; ++r) {
    if (s.first[r] >= s.last[r]) continue;
    first = s.first[r] < first ? s.first[r] : first;
    last = s.last[r] > last ? s.last[r] : last;
  }
  const int32_t end = (last + kTileTokens - 1) / kTileTokens * kTileTokens;
  for (int32_t start = first / kTileTokens * kTileTokens; start < last; start += kTileTokens) {
    Tile tile{start, clip(first - start) / kLanes, (clip(last - start) + kLanes - 1) / kLanes, {}, {}, {}};
    tile.cold = start <= first && !s.prefetched;
    // The next tiles' blocks lie elsewhere in the pool: ask for them while this one is computed. Loops may do
    // so, a line at a time: all at once they would keep a core's own loads waiting.
    constexpr int32_t kBlocks = kTileTokens / kLanes;
    for (int32_t b = 0; b < kBlocks; ++b) {
      const auto block = [&](int32_t tiles) -> const uint8_t* {
        const int32_t at = start + tiles * kTileTokens + b * kLanes;
        if (at < last) return s.pool + s.table[at / kLanes] * s.block_bytes;
        return at < end ? nullptr : s.next_blocks[(at - end) / kLanes];  // behind the span
      };
      const uint8_t *next = block(1), *far = kAtOnce > 1 ? block(2) : nullptr;
      if (!loops_ask && next != nullptr) ask_block(s, next);
      if (b < tile.lo || b >= tile.hi) continue;
      tile.block[b] = block(0);
      tile.next[b] = next != nullptr ? next : tile.block[b];
      tile.far[b] = far != nullptr ? far : tile.block[b];
    }
    if (loops_ask && tile.cold) {
      for (int32_t b = tile.lo; b < tile.hi; ++b) ask_block(s, tile.block[b]);
    }
    attend_one(tile);
  }
}

template <class Kv>
void attend(const AttentionSplit& s) {
  const bool loops_ask = kLoopsAsk<Kv> && (kAtOnce > 1 || s.rows >= kSharedRows<Kv>);
  if (s.heads == 1) {
    begin_rows(s);
    each_tile(s, loops_ask, [&](const Tile& tile) { attend_tile<Kv>(s, tile); });
    end_rows(s);
    return;
  }
  AttentionSplit heads[kMaxHeads];
  for (int32_t h = 0; h < s.heads; ++h) {
    heads[h] = head_of(s, h);
    begin_rows(heads[h]);
  }
  each_tile(s, loops_ask, [&](const Tile& tile) {
    for (int32_t h = 0; h < s.heads; ++h) attend_tile<Kv>(heads[h], tile);
  });
  for (int32_t h = 0; h < s.heads; ++h) end_rows(heads[h]);
}
