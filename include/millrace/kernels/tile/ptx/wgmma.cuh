// Matrix products of a warpgroup (sm_90a): operands in shared memory, accumulators in registers,
// asynchronous. Operands are K-major rows of 128 bytes (64 f16 or bf16), their 16-byte chunks exchanged by
// chunk ^ (row % 8), eight rows after the other: the 128-byte swizzle. Lane (g, t) of warp w has in
// d[4j..4j+3] row 16w + g columns 8j + 2t and + 1, then row 16w + g + 8. Elsewhere (no sm_90a) nothing here
// may be called.
#pragma once

#include "millrace/kernels/tile/ptx/wgmma_widths.cuh"

namespace millrace::cuda::ptx {

inline constexpr int kSwizzleRowBytes = 128;
inline constexpr int kWarpgroupThreads = 128, kWarpgroupWarps = 4;

// Where byte `at` of row `row` lies in such an operand.
__host__ __device__ inline constexpr uint32_t swizzled(uint32_t row, uint32_t at) {
  return row * kSwizzleRowBytes + (at ^ (row % 8 * 16));
}

#ifdef MILLRACE_HAS_WGMMA

// The descriptor of a K-major operand at `p` (1,024-byte aligned): eight rows are 1,024 bytes from the next
// eight. 16 elements of K further on: + 2.
__device__ inline uint64_t wgmma_operand_at(uint32_t address) {
  constexpr uint64_t kEightRows = 1024 / 16, kSwizzle128 = 1;
  return uint64_t{(address & 0x3ffffu) >> 4} | uint64_t{1} << 16 | kEightRows << 32 | kSwizzle128 << 62;
}
__device__ inline uint64_t wgmma_operand(const void* p) { return wgmma_operand_at(shared_address(p)); }
// A value that all lanes of the warp have, for the compiler to know it: what is computed from it is computed
// once for the warp, in uniform registers.
__device__ inline uint32_t warp_uniform(uint32_t value) { return __shfl_sync(0xffffffffu, value, 0); }

// The descriptor of an MN-major operand, for wgmma_bf16_transposed: a row is one element of K, its 128 bytes
// are 64 outputs, swizzled alike; the next 64 outputs lie `next_bytes` further. 16 elements of K further on:
// + 128.
__device__ inline uint64_t wgmma_transposed_operand(const void* p, uint32_t next_bytes) {
  constexpr uint64_t kEightRows = 1024 / 16, kSwizzle128 = 1;
  return uint64_t{(shared_address(p) & 0x3ffffu) >> 4} | uint64_t{next_bytes >> 4} << 16 | kEightRows << 32 |
         kSwizzle128 << 62;
}

// Before the first product of a batch: registers written by this warpgroup are the tensor core's now.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kLeft committed batches are under way.
template <int kLeft>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Keeps the compiler from reading these registers before, or writing them after, this point: accumulators and
// A operands of products that are under way are the tensor core's.
template <int kCount>
__device__ inline void fence_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kSteps>
__device__ inline void fence_registers(uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}
// For a branch that is never taken: the assembler moves no wait for products across it, and it costs nothing.
__device__ inline void sleep_for_nothing() { asm volatile("nanosleep.u32 0;"); }

// How many registers a thread of this warpgroup has from here on.
template <int kRegisters>
__device__ inline void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// d (+)= a b of a warpgroup: 64 x 2 kSums outputs (a multiple of 8 up to 192), 16 elements of K. a: a lane's
// fragment as of ptx/mma.cuh's m16n8k16, of the warp's 16 rows; it may not change before the product is done.
template <int kSums>
__device__ inline void wgmma_bf16(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  Wgmma<2 * kSums>::registers_shared(d, a, b, accumulate);
}
// The same with a in shared memory too.
template <int kSums>
__device__ inline void wgmma_bf16(float (&d)[kSums], uint64_t a, uint64_t b, bool accumulate) {
  Wgmma<2 * kSums>::shared_shared(d, a, b, accumulate);
}
// d += a b where b is MN-major (wgmma_transposed_operand).
template <int kSums>
__device__ inline void wgmma_bf16_transposed(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b) {
  Wgmma<2 * kSums>::registers_transposed(d, a, b);
}

#endif  // MILLRACE_HAS_WGMMA

}  // namespace millrace::cuda::ptx
