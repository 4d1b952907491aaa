// Prefetching memory that is read later, into L2: no register waits for it.
#pragma once

namespace millrace::cuda::ptx {

__device__ inline void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// The line of four bytes at `from` into L1, for loads of read-only data that follow.
__device__ inline void warm_l1(const void* from) {
  [[maybe_unused]] uint32_t dropped;
  asm volatile("ld.global.nc.L1::evict_last.b32 %0, [%1];" : "=r"(dropped) : "l"(from));
}

}  // namespace millrace::cuda::ptx
