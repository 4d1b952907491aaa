// Which items a wide product by clusters has, and how they are shared out so that all clusters end together
// (wide_large.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace millrace::cuda {

inline constexpr int kMostClusters = 128;

// Segments [begin, end) of the columns of one item.
struct LargePiece {
  int32_t item, begin, end;
};

// Which pieces a cluster has, in order: perhaps the first segments of an item whose others another cluster
// has; items of its own, in rounds over all clusters; perhaps the last segments of an item.
struct LargeShares {
  int32_t items, segments;  // of each item
  int32_t clusters;
  int32_t rounds;  // of whole items; what is left, one to two items a cluster, is shared out by segments
  // Where a cluster's share of those begins, and the next one's: an item after the rounds, and how many of
  // its last segments belong to the cluster before.
  uint16_t first_item[kMostClusters + 1];
  uint8_t first_segment[kMostClusters + 1];

  void share_out(bool cut) {
    rounds = cut ? items / clusters - 1 : (items + clusters - 1) / clusters;
    const int64_t pool = cut ? int64_t{items - rounds * clusters} * segments : 0;
    for (int c = 0; c <= clusters; ++c) {
      const int64_t begin = c * pool / clusters;
      first_item[c] = static_cast<uint16_t>(begin / segments);
      first_segment[c] = static_cast<uint8_t>(begin % segments);
    }
  }
  // The cluster's piece number k; false: it has fewer.
  __host__ __device__ bool piece(int cluster, int k, LargePiece& piece) const {
    const int first = rounds * clusters;
    const int begin = first_item[cluster], begun = first_segment[cluster];
    const int end = first_item[cluster + 1], ended = first_segment[cluster + 1];
    if (begun != 0 && k-- == 0) {
      piece = {first + begin, 0, segments - begun};
      return true;
    }
    if (k < rounds) {
      piece = {k * clusters + cluster, 0, segments};
      return piece.item < items;
    }
    const int pool_item = begin + (begun != 0 ? 1 : 0) + k - rounds;
    piece = {first + pool_item, pool_item < end ? 0 : segments - ended, segments};
    return pool_item < end || (pool_item == end && ended != 0);
  }
};

inline constexpr int kClusterCtas = 2;
inline constexpr int kLargeTiles = 16;    // of weights, 8 rows each, of a CTA
inline constexpr int kLargeTokens = 192;  // of an item
inline constexpr int kLargeParts = 3;

// A CTA's part of one item.
struct LargeItem {
  int32_t part, first_tile;  // of weights
  int32_t first_token;
  bool apart;  // the other CTA has other tokens
};

// kSharesTokens: an item is 192 tokens and two CTAs' weights. Of a part with an odd number of those, the last
// ones go with two times 192 tokens, a CTA each. Else it is one CTA's weights and 192 tokens, half of them
// each. Items go in bands of tokens, in each all weights, in turn: those that run at the same time form a
// block, so that both operands are read out of L2 again.
template <bool kSharesTokens>
struct LargeGrid {
  static constexpr int kBand = 10;
  int32_t parts = 0, token_items = 0, weight_items = 0;  // without those that are apart
  int32_t part_items[kLargeParts] = {};
  int32_t apart[kLargeParts] = {};                    // items, 0 or half of the tokens' rounded up
  float per_band = 0, per_row = 0, per_last_row = 0;  // one over how many items a band and its rows have

  LargeGrid() = default;
  LargeGrid(const int32_t* part_tiles, int num_parts, int64_t rows)
      : parts(num_parts), token_items(static_cast<int32_t>((rows + kLargeTokens - 1) / kLargeTokens)) {
    for (int i = 0; i < parts; ++i) {
      const int ctas = (part_tiles[i] + kLargeTiles - 1) / kLargeTiles;
      part_items[i] = kSharesTokens ? ctas / kClusterCtas : ctas;
      apart[i] = kSharesTokens && ctas % kClusterCtas != 0 ? (token_items + 1) / 2 : 0;
      weight_items += part_items[i];
    }
    const int last_row = token_items % kBand;
    per_band = weight_items > 0 ? 1.0f / static_cast<float>(kBand * weight_items) : 0.0f;
    per_row = 1.0f / kBand;
    per_last_row = last_row > 0 ? 1.0f / static_cast<float>(last_row) : 0.0f;
  }
  int32_t items() const {
    int32_t all = weight_items * token_items;
    for (int i = 0; i < parts; ++i) all += apart[i];
    return all;
  }
  __host__ __device__ LargeItem item(int i, int rank) const {
    int part = 0;
    if (i >= weight_items * token_items) {
      i -= weight_items * token_items;
      while (i >= apart[part]) i -= apart[part++];
      return {part, part_items[part] * kClusterCtas * kLargeTiles, (kClusterCtas * i + rank) * kLargeTokens,
              true};
    }
    const int band_items = kBand * weight_items, band = divide(i, band_items, per_band);
    const int in_band = i - band * band_items, left = token_items - band * kBand;
    const bool last = left < kBand;
    const int wide = last ? left : kBand;
    int n = divide(in_band, wide, last ? per_last_row : per_row);
    const int m = band * kBand + in_band - n * wide;
    while (n >= part_items[part]) n -= part_items[part++];
    if (kSharesTokens) return {part, (kClusterCtas * n + rank) * kLargeTiles, m * kLargeTokens, false};
    return {part, n * kLargeTiles, m * kLargeTokens + rank * (kLargeTokens / kClusterCtas), false};
  }

 private:
  // n / by, of small numbers, with one over `by` at hand.
  __host__ __device__ static int divide(int n, int by, float inverse) {
    const int guess = static_cast<int>(static_cast<float>(n) * inverse);  // at most one off
    return guess - (guess * by > n ? 1 : 0) + ((guess + 1) * by <= n ? 1 : 0);
  }
};

inline constexpr int kFittedTokens = 128;  // of a CTA, of an item whose outputs are fitted to the SMs

// Items of so many tiles of weights and two times 128 tokens, a CTA each. They go in bands of tokens, in each
// all weights, in turn.
struct FittedGrid {
  static constexpr int kBand = 8;
  int32_t parts = 0, token_items = 0, weight_items = 0, tiles = 0;
  int32_t part_items[kLargeParts] = {};

  FittedGrid() = default;
  FittedGrid(const int32_t* part_tiles, int num_parts, int64_t rows, int item_tiles)
      : parts(num_parts),
        token_items(
            static_cast<int32_t>((rows + kClusterCtas * kFittedTokens - 1) / (kClusterCtas * kFittedTokens))),
        tiles(item_tiles) {
    for (int i = 0; i < parts; ++i) {
      part_items[i] = (part_tiles[i] + tiles - 1) / tiles;
      weight_items += part_items[i];
    }
  }
  int32_t items() const { return weight_items * token_items; }
  __host__ __device__ LargeItem item(int i, int rank) const {
    const int band = i / (kBand * weight_items), in_band = i - band * kBand * weight_items;
    const int left = token_items - band * kBand, wide = left < kBand ? left : kBand;
    int n = in_band / wide, part = 0;
    const int m = band * kBand + in_band - n * wide;
    while (n >= part_items[part]) n -= part_items[part++];
    return {part, n * tiles, (kClusterCtas * m + rank) * kFittedTokens, false};
  }
};

// What so many items take of so many clusters, one of them taking `time`: those that are cut have no rounds,
// all end together.
inline int64_t shares_time(int64_t items, int64_t clusters, int64_t time, bool cut) {
  if (items <= clusters) return time;
  return cut ? time * items / clusters : time * ((items + clusters - 1) / clusters);
}

// The widths there are, in tiles of eight outputs (wide_large.cu).
inline constexpr int kFittedTiles[] = {6, 8, 10, 11, 12, 16, 20, 21, 23, 24};

// The width of fitted items that should take least, and what, beside 560 for a round of 128 x 128: 80 to 192
// outputs took 15.3 to 29.4 us a round of q, k, v of gpt-oss-20b, where 128 x 128 took 21.8, and a second
// item more than its products (gemm_bench on an H200). tiles 0: not for this many rows. More than two items a
// cluster were not faster than 256 x 192, and 128 rows have nothing for the second CTA.
struct FittedWidth {
  int32_t tiles = 0;
  int64_t time = 0;

  FittedWidth(const int32_t* part_tiles, int num_parts, int64_t rows, int64_t clusters, bool cut) {
    if (rows <= kFittedTokens) return;
    for (const int width : kFittedTiles) {
      const int64_t items = FittedGrid(part_tiles, num_parts, rows, width).items();
      if (items > 2 * clusters) continue;
      const int64_t takes =
          shares_time(items, clusters, 120 + 27 * width, cut) + (items > clusters ? kSecondItemTime : 0);
      if (tiles == 0 || takes < time) tiles = width, time = takes;
    }
  }

 private:
  static constexpr int64_t kSecondItemTime = 85;
};

}  // namespace millrace::cuda
