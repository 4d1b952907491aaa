// Work items of the forward kernel: (sequence, head, tile of queries, split of the keys). A persistent CTA
// takes its first by its index and the next from a counter in the workspace, so that it makes no difference
// how long each takes (of narrow windows, whose items are alike, every gridDim-th); who takes one does not
// change its result. Of causal calls the longest come first. Heads go in sections whose keys and values fit
// in L2.
#pragma once

#include "kernels/cuda/attention/flash_problem.cuh"

namespace millrace::cuda {

struct FlashSchedule {
  int32_t* counter;      // of items taken beyond the first of each CTA
  int32_t* tile_starts;  // ragged: [batch + 1], tiles of the sequences before; null: dense
  int32_t tiles;         // of a sequence; ragged: of all together at most
  int32_t heads;         // of a sequence: query heads, of backward KV heads
  int32_t splits;        // of each tile's keys
  int32_t section;       // heads (of all sequences) that go together

  struct Item {
    int32_t b, head, tile, split;
  };
  __device__ int32_t items(const FlashShape& s) const {
    return (tile_starts != nullptr ? tile_starts[s.batch] : tiles * s.batch) * heads * splits;
  }
  __device__ Item at(const FlashShape& s, int32_t taken) const {
    const int32_t item = taken / splits, split = taken - item * splits;
    if (tile_starts != nullptr) {
      const int32_t t = item / heads;
      int32_t low = 0, past = s.batch;  // tile_starts[low] <= t < tile_starts[past]
      while (past - low > 1) {
        const int32_t middle = (low + past) / 2;
        (tile_starts[middle] <= t ? low : past) = middle;
      }
      return {low, item - t * heads, tile_starts[low + 1] - 1 - t, split};
    }
    const int32_t all = s.batch * heads, first = item / (section * tiles) * section;
    const int32_t in_section = item - first * tiles, here = min(section, all - first);
    const int32_t head = first + in_section % here;
    return {head / heads, head % heads, tiles - 1 - in_section / here, split};
  }
};

// Zeroes the counter and, ragged, adds up tiles. One CTA of kFlashPlanThreads.
inline constexpr int kFlashPlanThreads = 256;
static __global__ void __launch_bounds__(kFlashPlanThreads)
    flash_plan_kernel(const int32_t* cu, int32_t batch, int32_t tile_rows, int32_t* counter,
                      int32_t* tile_starts) {
  __shared__ int32_t sums[kFlashPlanThreads];
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  if (thread == 0) *counter = 0;
  if (tile_starts == nullptr) return;
  int32_t before = 0;
  for (int32_t from = 0; from < batch; from += kFlashPlanThreads) {
    const int32_t b = from + thread;
    const int32_t mine = b < batch ? (cu[b + 1] - cu[b] + tile_rows - 1) / tile_rows : 0;
    sums[thread] = mine;
    __syncthreads();  // all counts are there
    for (int32_t distance = 1; distance < kFlashPlanThreads; distance *= 2) {
      const int32_t add = thread >= distance ? sums[thread - distance] : 0;
      __syncthreads();  // all have read
      sums[thread] += add;
      __syncthreads();  // all have written
    }
    if (b < batch) tile_starts[b] = before + sums[thread] - mine;
    before += sums[kFlashPlanThreads - 1];
    __syncthreads();  // all have read the total
  }
  if (thread == 0) tile_starts[batch] = before;
}

}  // namespace millrace::cuda
