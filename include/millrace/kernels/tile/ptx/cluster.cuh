// Clusters (sm_90 and later): CTAs on neighbouring SMs that reach each other's shared memory, and copies that
// arrive in all of them. In code for older GPUs nothing, as in barrier.cuh.
#pragma once

#include <cuda.h>

#include "millrace/kernels/tile/ptx/barrier.cuh"

namespace millrace::cuda::ptx {

// A barrier of all threads of all of the cluster's CTAs, in two steps, for who has to know that the others
// are there: nothing that was written is waited for. With .release on the arrival CTAs ended half a
// microsecond later, when their outputs were in L2.
__device__ inline void cluster_arrive() {
  MILLRACE_BULK_ASM("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  MILLRACE_BULK_ASM("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// A map on its way to where copies look for it.
__device__ inline void prefetch_map(const CUtensorMap* map) {
  MILLRACE_BULK_ASM("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Where a CTA of the cluster has what this one has at `address`.
__device__ inline uint32_t remote_address(uint32_t cta, uint32_t address) {
  uint32_t there = address;
  MILLRACE_BULK_ASM("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
  return there;
}
__device__ inline void barrier_arrive_remote(uint32_t address) {
  MILLRACE_BULK_ASM("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}

// As bulk_copy_kept and tma_load_2d: to the same place in each CTA of `ctas` (a bit each), completing on each
// one's barrier.
__device__ inline void bulk_copy_multicast(uint16_t ctas, void* to, const void* from, uint32_t bytes,
                                           uint64_t* barrier) {
  MILLRACE_BULK_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
      "[%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "h"(ctas)
      : "memory");
}
__device__ inline void tma_load_box_multicast(uint16_t ctas, void* to, const CUtensorMap* map, int32_t inner,
                                              int32_t outer, uint64_t* barrier) {
  MILLRACE_BULK_ASM(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(inner), "r"(outer), "r"(shared_address(barrier)), "h"(ctas)
      : "memory");
}
__device__ inline void tma_load_2d_multicast(uint16_t ctas, void* to, const CUtensorMap* map, int32_t at,
                                             int32_t row, uint64_t* barrier) {
  tma_load_box_multicast(ctas, to, map, at / 4, row, barrier);
}

}  // namespace millrace::cuda::ptx
