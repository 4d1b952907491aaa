// Words in global memory through which the CTAs of one kernel, all of them resident, wait for one another.
#pragma once

#include <cstdint>

#include "millrace/kernels/tile/ptx/barrier.cuh"

namespace millrace::cuda::ptx {

// A word with its tag, in one access: whoever sees the tag has the word.
__device__ inline void store_tagged(uint64_t* to, uint32_t word, uint32_t tag) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(uint64_t{tag} << 32 | word) : "memory");
}
__device__ inline uint32_t wait_tagged(const uint64_t* from, uint32_t tag) {
  uint64_t value;
  do {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  } while (static_cast<uint32_t>(value >> 32) != tag);
  return static_cast<uint32_t>(value);
}

// What this thread wrote, or has seen written (through a barrier of the CTA), is there for those who see the
// count.
__device__ inline void add_release(uint32_t* count, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(count), "r"(value) : "memory");
}
// Returns when the count has reached `target`; counts may wrap around.
__device__ inline void wait_count(const uint32_t* count, uint32_t target) {
  uint32_t value;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
  } while (static_cast<int32_t>(value - target) < 0);
}

// `bytes` (a multiple of 16) on their way to L2.
__device__ inline void prefetch_l2(const void* from, uint32_t bytes) {
  MILLRACE_BULK_ASM("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace millrace::cuda::ptx
