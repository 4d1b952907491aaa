// Warp products of either 16-bit type with float32 sums, and 16-byte copies to shared memory, written so that
// a kernel compiles from sm_75 on. Fragments as in mma_f16.cuh and mma.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "millrace/kernels/tile/ptx/barrier.cuh"
#include "millrace/kernels/tile/ptx/mma_f16.cuh"

namespace millrace::cuda::ptx {

template <class Element>
__device__ inline void mma_16bit(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ inline void mma_16bit<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_f16(d, a, b0, b1);
}
// Nothing before sm_80, where it must not be launched.
template <>
__device__ inline void mma_16bit<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                uint32_t b1) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// 16 bytes, or zeros where they are not there (`from` is not read then, but must be an address). Before sm_80
// through registers.
__device__ inline void copy16_or_zero(void* to, const void* from, bool there) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
#else
  *static_cast<uint4*>(to) = there ? __ldg(static_cast<const uint4*>(from)) : uint4{0, 0, 0, 0};
#endif
}
__device__ inline void copy_commit() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until at most kLeft of this thread's groups are still under way.
template <int kLeft>
__device__ inline void copy_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

}  // namespace millrace::cuda::ptx
