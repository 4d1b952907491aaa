// How the items of a wide product are shared out to clusters so that all end together (wide_large.cuh).
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

}  // namespace millrace::cuda
