// Sixteen bytes at a time from global to shared memory, in groups that are waited for in order.
#pragma once

#include "kernels/cuda/ptx/barrier.cuh"

namespace millrace::cuda::ptx {

__device__ inline void async_copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
// The same for what is read once; and the arrival on a barrier, one of those it counts, that follows this
// thread's copies (sm_90 and later).
__device__ inline void async_copy16_once(void* to, const void* from) {
  MILLRACE_BULK_ASM("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                    "l"(from), "l"(kEvictFirst)
                    : "memory");
}
__device__ inline void async_arrive(uint64_t* barrier) {
  MILLRACE_BULK_ASM("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
                    : "memory");
}
__device__ inline void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kLeft of this thread's groups are still under way.
template <int kLeft>
__device__ inline void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace millrace::cuda::ptx
