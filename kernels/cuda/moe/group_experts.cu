// Sorts (token, slot) pairs by expert for a grouped GEMM: counts, prefix sums and places in one CTA. Bound by
// latency: a few microseconds, for the pairs of a step are some ten thousand at most.
#include "kernels/cuda/moe/group_experts.h"

#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

namespace millrace::cuda {
namespace {

// One CTA. Within an expert rows come in whatever order the atomics give: no row's result depends on it.
__global__ void __launch_bounds__(1024)
    group_experts_kernel(const int32_t* chosen, int64_t pairs, int32_t experts, ExpertGroups groups) {
  extern __shared__ int32_t counts[];  // [experts], then where each expert's next row goes
  int32_t* next = counts + experts;
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
  for (int64_t i = threadIdx.x; i < groups.max_rows; i += blockDim.x) groups.order[i] = -1;
  __syncthreads();  // zeros before counts
  for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) atomicAdd(&counts[__ldcg(chosen + i)], 1);
  __syncthreads();  // counted
  if (threadIdx.x == 0) {
    int32_t tile = 0, chunk = 0;
    for (int32_t e = 0; e < experts; ++e) {
      next[e] = tile * groups.tile_rows;
      int32_t rows = counts[e], tiles = (rows + groups.tile_rows - 1) / groups.tile_rows;
      while (tiles > 0) {
        const int32_t here = min(tiles, groups.tiles_per_chunk);
        groups.chunks[4 * chunk] = e;
        groups.chunks[4 * chunk + 1] = tile;
        groups.chunks[4 * chunk + 2] = here;
        groups.chunks[4 * chunk + 3] = min(rows, here * groups.tile_rows);
        rows -= here * groups.tile_rows;
        ++chunk;
        tile += here;
        tiles -= here;
      }
    }
    *groups.num_chunks = chunk;
  }
  __syncthreads();  // placed
  for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    const int32_t row = atomicAdd(&next[__ldcg(chosen + i)], 1);
    groups.order[row] = static_cast<int32_t>(i);
    groups.sorted_rows[i] = row;
  }
}

}  // namespace

ExpertGroups expert_groups(int32_t* base, int64_t pairs, int32_t experts, const Device& device) {
  ExpertGroups groups;
  const int64_t tile_rows = gemm_tile_rows(device), touched = pairs < experts ? pairs : experts;
  // Many rows per expert: large tiles; else small ones, whose padding costs less.
  const bool many = pairs > int64_t{experts} * 48;
  groups.tiles_per_chunk = device.has_wgmma() ? (many ? 2 : 1)
                           : many             ? kMmaLargeBatchTiles
                                              : kMmaSmallBatchTiles;
  groups.tile_rows = static_cast<int32_t>(tile_rows);
  groups.max_rows = (pairs / tile_rows + touched) * tile_rows;
  groups.max_chunks = static_cast<int32_t>(pairs / (tile_rows * groups.tiles_per_chunk) + touched);
  groups.order = base;
  groups.sorted_rows = base + groups.max_rows;
  groups.chunks = groups.sorted_rows + pairs;
  groups.num_chunks = groups.chunks + 4 * int64_t{groups.max_chunks};
  return groups;
}

size_t expert_groups_ints(int64_t pairs, int32_t experts, const Device& device) {
  // The smaller tiles have more chunks: enough for either.
  const int64_t tile_rows = gemm_tile_rows(device), touched = pairs < experts ? pairs : experts;
  return static_cast<size_t>((pairs / tile_rows + touched) * (tile_rows + 4) + pairs + 1);
}

void launch_group_experts(const int32_t* chosen, int64_t pairs, int32_t experts, const ExpertGroups& groups,
                          const Launch& at) {
  if (pairs == 0) return;
  const size_t shared_bytes = 2 * static_cast<size_t>(experts) * sizeof(int32_t);
  launch_dependent("group_experts_kernel", group_experts_kernel, dim3(1), 1024, shared_bytes, at, chosen,
                   pairs, experts, groups);
}

}  // namespace millrace::cuda
