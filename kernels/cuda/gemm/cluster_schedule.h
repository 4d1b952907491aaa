// The work items of a GEMM by clusters, and the schedule that assigns them so that all clusters finish
// together (wgmma_cluster.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace millrace::cuda {

inline constexpr int kMaxClusters = 128;

// A piece of a work item: segments [begin, end) of its K.
struct ClusterPiece {
  int32_t item, begin, end;
};

// Which pieces a cluster has, in order: perhaps the first segments of an item whose others another cluster
// has; items of its own, in rounds over all clusters; perhaps the last segments of an item.
struct ClusterSchedule {
  int32_t items, segments;  // of each item
  int32_t clusters;
  int32_t rounds;  // of whole items; what is left, one to two items a cluster, is assigned by segments
  // Where a cluster's part of those begins, and the next one's: an item after the rounds, and how many of
  // its last segments belong to the cluster before.
  uint16_t first_item[kMaxClusters + 1];
  uint8_t first_segment[kMaxClusters + 1];

  // split: items may be split between two clusters; else in rounds.
  void assign(bool split) {
    rounds = split ? items / clusters - 1 : (items + clusters - 1) / clusters;
    const int64_t pool = split ? int64_t{items - rounds * clusters} * segments : 0;
    for (int c = 0; c <= clusters; ++c) {
      const int64_t begin = c * pool / clusters;
      first_item[c] = static_cast<uint16_t>(begin / segments);
      first_segment[c] = static_cast<uint8_t>(begin % segments);
    }
  }
  // The cluster's piece number k; false: it has fewer.
  __host__ __device__ bool piece(int cluster, int k, ClusterPiece& piece) const {
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
inline constexpr int kMaxParts = 3;

// A CTA's part of one item.
struct ClusterItem {
  int32_t part, first_tile;  // of weights
  int32_t first_token;
};

// What a CTA of a cluster has of an item: so many tiles of eight outputs, and tokens. The shapes there are
// (bf16_wgmma_cluster.cu).
struct ClusterShape {
  int tiles, tokens;
};
inline constexpr ClusterShape kClusterShapes[] = {{6, 64},   {10, 64},  {6, 128},  {8, 128},
                                                  {10, 128}, {11, 128}, {12, 128}, {16, 128},
                                                  {20, 128}, {21, 128}, {23, 128}, {24, 128}};

// Items of so many tiles of weights and the tokens of two CTAs. They go in bands of tokens, in each all
// weights, in turn: those that run at the same time form a block, so that both operands are read out of L2
// again.
struct ClusterGrid {
  static constexpr int kBand = 8;
  ClusterShape shape = {};
  int32_t parts = 0, token_items = 0, weight_items = 0;
  int32_t part_items[kMaxParts] = {};

  ClusterGrid() = default;
  ClusterGrid(const int32_t* part_tiles, int num_parts, int64_t rows, ClusterShape of)
      : shape(of),
        parts(num_parts),
        token_items(
            static_cast<int32_t>((rows + kClusterCtas * of.tokens - 1) / (kClusterCtas * of.tokens))) {
    for (int i = 0; i < parts; ++i) {
      part_items[i] = (part_tiles[i] + shape.tiles - 1) / shape.tiles;
      weight_items += part_items[i];
    }
  }
  int32_t items() const { return weight_items * token_items; }
  __host__ __device__ ClusterItem item(int i, int rank) const {
    const int band = i / (kBand * weight_items), in_band = i - band * kBand * weight_items;
    const int left = token_items - band * kBand, width = left < kBand ? left : kBand;
    int n = in_band / width, part = 0;
    const int m = band * kBand + in_band - n * width;
    while (n >= part_items[part]) n -= part_items[part++];
    return {part, n * shape.tiles, (kClusterCtas * m + rank) * shape.tokens};
  }
};

// How so many items should be assigned to so many clusters, and what that takes: in rounds, or split along K,
// so that all finish together. Times are of 2,880 columns, in units of which 560 are a round of 128 x 128;
// what does not grow with the columns, beginning and end of a launch and passing on partial sums, weighs less
// where there are more.
struct ScheduleCost {
  int64_t time;
  bool split;

  ScheduleCost(int64_t items, int64_t clusters, int64_t item_time, int64_t k_steps, bool may_split) {
    const int64_t rounds = (items + clusters - 1) / clusters;
    const int64_t even = item_time * items / clusters + kPartialTime * kTypicalKSteps / k_steps;
    split = may_split && items > clusters && even < rounds * item_time;
    time = kLaunchTime * kTypicalKSteps / k_steps + (split ? even : rounds * item_time);
  }

 private:
  static constexpr int64_t kLaunchTime = 80, kPartialTime = 135, kTypicalKSteps = 2880 / 64;
};

// The shape of items that should take least, and what, by `gemm_bench shapes` on an H200 (26 units
// were a microsecond). -1: not for this many rows; half of the CTAs would have none.
struct ClusterChoice {
  int32_t shape = -1;
  int64_t time = 0;

  static constexpr int64_t item_time(ClusterShape shape) {
    if (shape.tokens == 64) return 95 + 27 * shape.tiles / 2;
    const int64_t five_stages = 90 + 47 * shape.tiles / 2;
    return shape.tiles > 20 ? five_stages * 103 / 100 : five_stages;  // four fit
  }
  ClusterChoice(const int32_t* part_tiles, int num_parts, int64_t rows, int64_t k_steps, int64_t clusters,
                bool may_split) {
    int32_t i = -1;
    for (const ClusterShape candidate : kClusterShapes) {
      ++i;
      if (rows <= candidate.tokens) continue;
      const int64_t items = ClusterGrid(part_tiles, num_parts, rows, candidate).items();
      const int64_t takes = ScheduleCost(items, clusters, item_time(candidate), k_steps, may_split).time;
      if (shape < 0 || takes < time) shape = i, time = takes;
    }
  }
};

}  // namespace millrace::cuda
