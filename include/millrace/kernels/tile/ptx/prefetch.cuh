// Asking for memory that is read later, into L2: no register waits for it.
#pragma once

namespace millrace::cuda::ptx {

__device__ inline void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

}  // namespace millrace::cuda::ptx
