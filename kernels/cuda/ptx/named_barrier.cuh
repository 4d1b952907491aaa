// A barrier of some warps of a CTA: ids 1 to 15, of which 0 is __syncthreads.
#pragma once

namespace millrace::cuda::ptx {

// Until `threads` (whole warps) have come; what they wrote to shared memory before is there behind it.
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace millrace::cuda::ptx
