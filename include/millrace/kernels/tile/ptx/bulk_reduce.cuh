// Additions from shared to global memory by the copy engine (sm_90 and later), the counters that put them in
// order, and the store of matrix fragments (stmatrix). In code for older GPUs nothing, as in barrier.cuh.
#pragma once

#include "millrace/kernels/tile/ptx/barrier.cuh"

namespace millrace::cuda::ptx {

// Adds `bytes` of float32 (a multiple of 16) in shared memory, published, to global memory; of this thread's
// group.
__device__ inline void bulk_add(float* to, const void* from, uint32_t bytes) {
  MILLRACE_BULK_ASM("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                    "r"(shared_address(from)), "r"(bytes)
                    : "memory");
}
// The same of int32, whose sums do not depend on their order.
__device__ inline void bulk_add(int32_t* to, const void* from, uint32_t bytes) {
  MILLRACE_BULK_ASM("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;" ::"l"(to),
                    "r"(shared_address(from)), "r"(bytes)
                    : "memory");
}
// Until all of this thread's groups have been written.
__device__ inline void bulk_written() { MILLRACE_BULK_ASM("cp.async.bulk.wait_group 0;" ::: "memory"); }

// A counter in global memory: what was done before a release is seen by who acquired the count.
__device__ inline int32_t load_acquire(const int32_t* counter) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
__device__ inline void store_release(int32_t* counter, int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

// Four matrices of 8 x 8 of 16 bits: lane l has the address of row l % 8 of matrix l / 8, and of matrix i, in
// a[i], columns 2t and 2t + 1 of row g.
__device__ inline void store_matrices(uint32_t address, const uint32_t (&a)[4]) {
  MILLRACE_BULK_ASM("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                    "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
                    : "memory");
}
// The same of matrices that lie transposed: a[i] has rows 2t and 2t + 1 of column g.
__device__ inline void store_matrices_transposed(uint32_t address, const uint32_t (&a)[4]) {
  MILLRACE_BULK_ASM("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                    "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
                    : "memory");
}

}  // namespace millrace::cuda::ptx
