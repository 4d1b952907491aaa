// Barriers of a block and the ring of stages between a producer and its consumers.
//
//     producer    wait empty[i] -> issue copies to stage i   -> they arrive on full[i]
//     consumers   wait full[i]  -> read stage i              -> each arrives on empty[i]
//
// Who is at round n of a ring is at stage n % kStages, and waits for the phase of parity n / kStages % 2.
// With clusters a stage is filled in all CTAs at once, so that it is empty when the consumers of all of them
// have read it.
#pragma once

#include "millrace/kernels/tile/ptx/barrier.cuh"
#include "millrace/kernels/tile/ptx/cluster.cuh"
#include "millrace/kernels/tile/ptx/wgmma.cuh"

namespace millrace::tile {

namespace ptx = millrace::cuda::ptx;

inline constexpr int kWarpgroupThreads = ptx::kWarpgroupThreads;

// A place in a ring of kStages.
template <int kStages>
struct Cursor {
  uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ Cursor& operator++() {
    if (++stage == kStages) stage = 0, parity ^= 1u;
    return *this;
  }
  // Of round n.
  __device__ __forceinline__ static Cursor at(uint32_t n) { return {n % kStages, n / kStages % 2}; }
};

// The barriers of a ring, in shared memory: the stages themselves lie where the kernel wants them.
template <int kStageCount, int kCtas = 1>
struct RingBarriers {
  static constexpr int kStages = kStageCount;
  using Cursor = tile::Cursor<kStages>;
  uint64_t full[kStages], empty[kStages];

  // By one thread, before a barrier of the block (with clusters, of the cluster). readers: arrivals on
  // `empty` of each CTA.
  __device__ void init(uint32_t readers) {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(full + i, 1);
      ptx::barrier_init(empty + i, kCtas * readers);
    }
    ptx::barrier_init_fence();
  }
  // The producer: until the stage is empty (the first round is).
  __device__ __forceinline__ void wait_empty(Cursor at) {
    ptx::barrier_wait(empty + at.stage, at.parity ^ 1u);
  }
  // By one thread: so many bytes will come.
  __device__ __forceinline__ void expect(Cursor at, uint32_t bytes) {
    ptx::barrier_arrive_expect(full + at.stage, bytes);
  }
  // A consumer: until the stage is full.
  __device__ __forceinline__ void wait_full(Cursor at) { ptx::barrier_wait(full + at.stage, at.parity); }
  // By one thread of each reader: it has read the stage.
  __device__ __forceinline__ void release(Cursor at) {
    ptx::barrier_arrive(empty + at.stage);
    if constexpr (kCtas == 2) {
      ptx::barrier_arrive_remote(
          ptx::remote_address(blockIdx.x % kCtas ^ 1u, ptx::shared_address(empty + at.stage)));
    } else if constexpr (kCtas > 2) {
      for (uint32_t i = 1; i < kCtas; ++i) {
        ptx::barrier_arrive_remote(
            ptx::remote_address((blockIdx.x + i) % kCtas, ptx::shared_address(empty + at.stage)));
      }
    }
  }
};

// A ring with its stages: what the kernel declares in shared memory.
template <class Stage, int kStageCount, int kCtas = 1>
struct Ring {
  using Cursor = tile::Cursor<kStageCount>;
  Stage stages[kStageCount];
  RingBarriers<kStageCount, kCtas> barriers;

  __device__ void init(uint32_t readers) { barriers.init(readers); }
  // The producer, one thread: the stage, empty, sizeof(Stage) of which will come.
  __device__ __forceinline__ Stage& acquire(Cursor at) {
    barriers.wait_empty(at);
    barriers.expect(at, sizeof(Stage));
    return stages[at.stage];
  }
  __device__ __forceinline__ uint64_t* full(Cursor at) { return barriers.full + at.stage; }
  // A consumer: the stage, full.
  __device__ __forceinline__ Stage& wait(Cursor at) {
    barriers.wait_full(at);
    return stages[at.stage];
  }
  // By one thread of each reader.
  __device__ __forceinline__ void release(Cursor at) { barriers.release(at); }
  // The same by all threads of a warpgroup, which goes on to the next stage.
  __device__ __forceinline__ void leave(Cursor& at) {
    if (threadIdx.x % kWarpgroupThreads == 0) barriers.release(at);
    ++at;
  }
};

// Turns of two warpgroups, 0 and 1, by the named barriers kName and kName + 1: wait() returns when the other
// one has passed its turn. Warpgroup 0 has the first.
template <int kName>
struct Turns {
  int warpgroup;
  __device__ explicit Turns(int of) : warpgroup(of) {
    if (warpgroup == 1) pass();
  }
  __device__ __forceinline__ void wait() const {
    ptx::named_barrier<2 * kWarpgroupThreads>(kName + warpgroup);
  }
  __device__ __forceinline__ void pass() const {
    ptx::named_arrive<2 * kWarpgroupThreads>(kName + 1 - warpgroup);
  }
};

// ---------------------------------------------------------------- roles

// This thread's warpgroup, known to be one for the warp.
__device__ inline int warpgroup_index() {
  return static_cast<int>(__shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0));
}
// This thread's warp in its warpgroup.
__device__ inline int warpgroup_warp() {
  return static_cast<int>(__shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0));
}
// One thread of each warpgroup.
__device__ inline bool warpgroup_leader() { return threadIdx.x % kWarpgroupThreads == 0; }

// Dynamic shared memory as what the kernel declares, 1,024-byte aligned (block_memory_bytes has room for
// that).
template <class Block>
__device__ inline Block& block_memory() {
  extern __shared__ uint8_t millrace_tile_memory[];
  return *reinterpret_cast<Block*>(millrace_tile_memory +
                                   (1024u - ptx::shared_address(millrace_tile_memory) % 1024u) % 1024u);
}
template <class Block>
inline constexpr int block_memory_bytes = static_cast<int>(sizeof(Block)) + 1024;

// A barrier of the block, or of all blocks of the cluster.
template <int kCtas = 1>
__device__ inline void sync_cluster() {
  __syncthreads();
  if constexpr (kCtas > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}
// The same at a kernel's end, where warps come on their own: no CTA ends while others may write to it.
template <int kCtas>
__device__ inline void leave_cluster() {
  if constexpr (kCtas > 1) {
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

}  // namespace millrace::tile
