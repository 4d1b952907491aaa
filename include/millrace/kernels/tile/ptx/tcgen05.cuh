// Tensor memory and block-scaled products of e2m1 operands of sm_100a (tcgen05), as thin wrappers; operands
// and descriptors as quant/fp4_tiles.h has them. Elsewhere nothing here may be called.
#pragma once

#include <cstdint>

#include "millrace/kernels/tile/ptx/barrier.cuh"

#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
#define MILLRACE_HAS_TCGEN05 1
#endif

namespace millrace::cuda::ptx {

#ifdef MILLRACE_HAS_TCGEN05

// All lanes of one warp. The address of so many columns (a power of two from 32 on) goes to shared memory;
// waits while another CTA of the SM has them.
__device__ inline void tensor_alloc(uint32_t* address, uint32_t columns) {
  asm volatile(
      "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared_address(address)),
      "r"(columns)
      : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}
// All lanes of the same warp.
__device__ inline void tensor_free(uint32_t address, uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns)
               : "memory");
}

// Around a barrier of threads: what was issued before it is done before what others issue after it.
__device__ inline void tensor_fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ inline void tensor_fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// One thread. 32 rows of 16 bytes to four columns, the same to lanes 0 to 31, 32 to 63, 64 to 95, 96 to 127.
// A product that this thread issues after it finds them there.
__device__ inline void tensor_copy_scales(uint32_t address, uint64_t descriptor) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(address), "l"(descriptor) : "memory");
}

#define MILLRACE_TCGEN05_FP4(kind)                                                                     \
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %6, 0;\n tcgen05.mma.cta_group::1." kind            \
               " [%0], %1, %2, %3, [%4], [%5], p;\n}" ::"r"(sums),                                     \
               "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales), "r"(accumulate ? 1 : 0) \
               : "memory")

// One thread. sums (+)= a b. kNvfp4: e4m3 scales of 16 columns; else e8m0 of 32.
template <bool kNvfp4>
__device__ inline void tensor_mma_fp4(uint32_t sums, uint64_t a, uint64_t b, uint32_t instruction,
                                      uint32_t a_scales, uint32_t b_scales, bool accumulate) {
  if constexpr (kNvfp4) {
    MILLRACE_TCGEN05_FP4("kind::mxf4nvf4.block_scale.scale_vec::4X");
  } else {
    MILLRACE_TCGEN05_FP4("kind::mxf4.block_scale.scale_vec::2X");
  }
}

#undef MILLRACE_TCGEN05_FP4

// The thread that issued them: arrives once all copies and products so far are done.
__device__ inline void tensor_commit(uint64_t* barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   shared_address(barrier))
               : "memory");
}

// All lanes of warp w: 32 columns of lane 32 (w % 4) + its own, from the address' lane and column on.
__device__ inline void tensor_load(float (&v)[32], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
      : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]), "=f"(v[6]), "=f"(v[7]),
        "=f"(v[8]), "=f"(v[9]), "=f"(v[10]), "=f"(v[11]), "=f"(v[12]), "=f"(v[13]), "=f"(v[14]), "=f"(v[15]),
        "=f"(v[16]), "=f"(v[17]), "=f"(v[18]), "=f"(v[19]), "=f"(v[20]), "=f"(v[21]), "=f"(v[22]),
        "=f"(v[23]), "=f"(v[24]), "=f"(v[25]), "=f"(v[26]), "=f"(v[27]), "=f"(v[28]), "=f"(v[29]),
        "=f"(v[30]), "=f"(v[31])
      : "r"(address));
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}

#endif  // MILLRACE_HAS_TCGEN05

}  // namespace millrace::cuda::ptx
