// The grid's level of the tile vocabulary: which block has which tile, and blocks that wait for one another.
// Grids are persistent: as many blocks (or clusters) as are resident at once, each with one tile after the
// other.
#pragma once

#include <cstdint>

#include "millrace/kernels/tile/ptx/barrier.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"
#include "millrace/kernels/tile/ptx/grid_sync.cuh"

namespace millrace::tile {

namespace ptx = millrace::cuda::ptx;

// The tiles of a matrix in an order in which those that are in flight together share rows and columns, and so
// find operands in L2: `group` rows of tiles, column by column.
struct TileOrder {
  int32_t m_tiles, n_tiles, group;

  struct At {
    int32_t m, n;
  };
  __host__ __device__ int32_t count() const { return m_tiles * n_tiles; }
  __host__ __device__ At at(int32_t index) const {
    const int32_t per_group = group * n_tiles, first = index / per_group * group;
    const int32_t height = group < m_tiles - first ? group : m_tiles - first, inside = index % per_group;
    return {first + inside % height, inside / height};
  }
};

// A static schedule: f(tile) for this block's (or cluster's) tiles of `order`, the same for every warp that
// calls.
template <int kCtas = 1, class F>
__device__ __forceinline__ void each_tile(const TileOrder& order, F&& f) {
  const int32_t count = order.count(), step = static_cast<int32_t>(gridDim.x) / kCtas;
  for (int32_t i = static_cast<int32_t>(blockIdx.x) / kCtas; i < count; i += step) f(order.at(i));
}

// A dynamic one: blocks take their first item by their index and the next from a counter, which begins at 0.
// Who takes an item must not change its result.
struct WorkQueue {
  int32_t* counter;
  __device__ int32_t first() const { return static_cast<int32_t>(blockIdx.x); }
  __device__ int32_t next() const { return atomicAdd(counter, 1) + static_cast<int32_t>(gridDim.x); }
};

// A barrier of all blocks of a kernel, all of them resident: what they wrote before it is there for all after
// it. `count` begins at 0 and is left at rounds x blocks; each block counts its rounds from 1 on.
struct GridBarrier {
  uint32_t* count;
  __device__ void sync(uint32_t round) const {
    __syncthreads();  // the block's writes are done
    if (threadIdx.x == 0) {
      ptx::add_release(count, 1);
      ptx::wait_count(count, round * gridDim.x);
    }
    __syncthreads();  // the others' are there
  }
};

}  // namespace millrace::tile
