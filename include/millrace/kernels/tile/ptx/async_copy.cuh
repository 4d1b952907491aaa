// Sixteen or four bytes at a time from global to shared memory, in groups that are waited for in order.
#pragma once

#include "millrace/kernels/tile/ptx/barrier.cuh"

namespace millrace::cuda::ptx {

__device__ inline void async_copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ inline void async_copy4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ inline void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kLeft of this thread's groups are still under way.
template <int kLeft>
__device__ inline void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace millrace::cuda::ptx
