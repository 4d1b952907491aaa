// What CTAs of a cluster (sm_90 and later) write to and read from each other's shared memory, and the
// barriers that order it. In code for older GPUs nothing, as in barrier.cuh.
#pragma once

#include "millrace/kernels/tile/ptx/cluster.cuh"

namespace millrace::cuda::ptx {

// A barrier of all threads of all of the cluster's CTAs: what was written before it is there behind it, in
// shared memory too.
__device__ inline void cluster_sync() {
  __syncwarp();
  MILLRACE_BULK_ASM("barrier.cluster.arrive.release.aligned;" ::: "memory");
  MILLRACE_BULK_ASM("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Four numbers into shared memory of the cluster, at what remote_address gave.
__device__ inline void store_remote(uint32_t address, float a, float b, float c, float d) {
  MILLRACE_BULK_ASM("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b),
                    "f"(c), "f"(d)
                    : "memory");
}

}  // namespace millrace::cuda::ptx
