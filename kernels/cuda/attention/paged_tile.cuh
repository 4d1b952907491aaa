// What the attention kernels on the tensor cores share: the numerics, and the loads of keys and values into
// shared memory.
//
// The numerics, the same for one row (decode.cu, decode_split_kv.cu) and for many (prefill_wgmma.cu).
// Queries, times scale and log2 e, are rounded to bf16, probabilities too; sums are float32. Positions are
// cut at absolute multiples into tiles of 128 and splits of 512. Within a split an online softmax goes from
// tile to tile: row_max so far, row_sum and accumulator times exp2(old - new), then P V in a chain of 16
// positions after 16. The row_sum is kept in four lanes, (t) of a quad those of columns 2t and 2t + 1 of each
// 8: per page of 16 positions first, then the pages of a tile as a tree; the lanes are added at the end of a
// split. Splits are combined in order, the sink last. A tile or split that a row does not see changes
// nothing, so it makes no difference whether it is masked or left out: a row's bits depend on its position,
// the window and the cache. That warp and warpgroup products agree: docs/kernels/cuda_decode.md. An fp8 cache
// is one of bf16 numbers that are kept in fewer bytes: scales are powers of two, so it makes no difference
// whether keys and values are multiplied with them, or scores and probabilities.
#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/attention/key_tiles.h"
#include "kernels/cuda/attention/kv_cache.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "millrace/kernels/tile/ptx/approx.cuh"
#include "millrace/kernels/tile/ptx/barrier.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"
#include "millrace/kernels/tile/ptx/wgmma.cuh"

namespace millrace::cuda {

inline constexpr int kTilePages = kKeyTile / kBlockTokens;
inline constexpr int kPartDims = 64;  // dimensions of a swizzled row of 128 bytes
inline constexpr int kPagePartBytes = kBlockTokens * ptx::kSwizzleRowBytes;
inline constexpr int kTilePartBytes = kTilePages * kPagePartBytes;
inline constexpr float kLog2e = 1.4426950408889634f;

// What is subtracted from scores: of a row that has seen nothing yet, nothing.
__device__ inline float softmax_base(float row_max) { return row_max == -INFINITY ? 0.0f : row_max; }

__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Splits combined so far: their row_max and row_sum, and by which factors accumulators follow.
struct SplitCombine {
  float row_max = -INFINITY, row_sum = 0.0f;
  struct Factors {
    float mine, other;  // of what is combined already, of the split that is added
    __device__ float combine(float sum, float other_sum) const { return fmaf(sum, mine, other_sum * other); }
  };
  __device__ Factors add(float other_max, float other_sum) {
    const float new_max = fmaxf(row_max, other_max), base = softmax_base(new_max);
    const Factors factors{ptx::exp2_approx(row_max - base), ptx::exp2_approx(other_max - base)};
    row_sum = factors.combine(row_sum, other_sum);
    row_max = new_max;
    return factors;
  }
};

// The keys that a row sees.
struct KeyRange {
  int32_t first, last;  // positions
  __device__ int32_t first_tile() const { return first / kKeyTile; }
  __device__ int32_t past_tile() const { return last / kKeyTile + 1; }
  __device__ int32_t first_split() const { return first / kSplitKeys; }
  __device__ int32_t splits() const { return last / kSplitKeys - first_split() + 1; }
};
__device__ inline KeyRange visible_keys(int32_t position, int32_t window) {
  return {window > 0 && position >= window ? position - window + 1 : 0, position};
}

// Where the keys or the values of one tile come from. A producer warp loads them as [64 dimensions][128
// positions] of swizzled rows, once per 64 dimensions. Positions from `past` on and pages before `first_page`
// are not read; values there are zeros, since a probability of zero does not undo a NaN.
struct TileSource {
  const LayerCache& cache;
  const int32_t* table;  // [logical blocks of the sequence]
  int kv_head;
  int32_t first_page, past;
};
__device__ inline int32_t block_of_page(const TileSource& from, int32_t page) {
  return page >= from.first_page && page * kBlockTokens < from.past ? from.table[page] : kNoBlock;
}
// kPages pages from `first` on, a tile's or fewer, into [64 dimensions][kPages] of a stage. block: of page
// first + lane % kPages. By one warp; `full` completes when all of it is there.
template <int kDim, bool kValues, int kPages>
__device__ inline void load_pages(const TileSource& from, int32_t first, int32_t block, uint8_t* stage,
                                  uint64_t* full) {
  constexpr int kParts = kDim / kPartDims;
  static_assert(kParts * kPages <= kWarpLanes);
  const int lane = threadIdx.x % kWarpLanes, in_tile = lane % kPages, part = lane / kPages;
  const int32_t page = first + in_tile;
  int32_t rows = min(max(from.past - page * kBlockTokens, 0), kBlockTokens);
  if (block == kNoBlock || part >= kParts) rows = 0;
  if constexpr (kValues) {
    if (__any_sync(kAllLanes, part < kParts && rows < kBlockTokens)) {
      for (int i = 0; i < kParts * kPages; ++i) {
        uint8_t* to = stage + i * kPagePartBytes;
        const int begin = __shfl_sync(kAllLanes, rows, i) * ptx::kSwizzleRowBytes;
        for (int at = begin + 16 * lane; at < kPagePartBytes; at += 16 * kWarpLanes) {
          *reinterpret_cast<uint4*>(to + at) = uint4{0, 0, 0, 0};
        }
      }
      ptx::publish_to_async();
      __syncwarp();  // all zeros are there before the first lane says so
    }
  }
  const auto bytes = static_cast<uint32_t>(rows * ptx::kSwizzleRowBytes);
  const uint32_t all = __reduce_add_sync(kAllLanes, bytes);
  if (lane == 0) ptx::barrier_arrive_expect(full, all);
  __syncwarp();
  if (rows == 0) return;
  const auto* keys = keys_of_block<__nv_bfloat16>(from.cache, block, from.kv_head) +
                     part * (kPagePartBytes / static_cast<int>(sizeof(__nv_bfloat16)));
  ptx::bulk_copy_kept(stage + lane * kPagePartBytes, kValues ? keys + value_distance(from.cache) : keys,
                      bytes, full);
}
template <int kDim, bool kValues>
__device__ inline void load_tile(const TileSource& from, int32_t tile, uint8_t* stage, uint64_t* full) {
  const int32_t first = tile * kTilePages;
  const int32_t block = block_of_page(from, first + static_cast<int32_t>(threadIdx.x % kTilePages));
  load_pages<kDim, kValues, kTilePages>(from, first, block, stage, full);
}

// The same of an fp8 cache: whole pages after one another, keys with their scales before them. Codes that
// nobody stored are finite numbers, so nothing has to be zeros; scales are not looked at where a row does not
// see.
template <int kDim, bool kValues, int kPages>
__device__ inline void load_fp8_pages(const TileSource& from, int32_t block, uint8_t* stage, uint64_t* full) {
  constexpr uint32_t kPageBytes = kValues ? fp8_value_bytes(kDim) : fp8_key_bytes(kDim);
  const int lane = threadIdx.x % kWarpLanes;
  if (lane >= kPages) block = kNoBlock;
  const uint32_t all = __popc(__ballot_sync(kAllLanes, block != kNoBlock)) * kPageBytes;
  if (lane == 0) ptx::barrier_arrive_expect(full, all);
  __syncwarp();
  if (block == kNoBlock) return;
  const Fp8Head head = fp8_head(from.cache, block, from.kv_head);
  ptx::bulk_copy_kept(stage + lane * kPageBytes, kValues ? head.values : head.scales, kPageBytes, full);
}
template <int kDim, bool kValues>
__device__ inline void load_fp8_tile(const TileSource& from, int32_t tile, uint8_t* stage, uint64_t* full) {
  const int32_t page = tile * kTilePages + static_cast<int32_t>(threadIdx.x % kTilePages);
  load_fp8_pages<kDim, kValues, kTilePages>(from, block_of_page(from, page), stage, full);
}

}  // namespace millrace::cuda
