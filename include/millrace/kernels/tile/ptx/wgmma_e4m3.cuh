// wgmma.mma_async of E4M3 codes (m64nNk32) with float32 sums for attention: B K-major in shared memory, A
// there or in registers. Descriptors are those of wgmma.cuh; 32 codes of K further on: + 2.
#pragma once

#include "millrace/kernels/tile/ptx/wgmma_dense.cuh"

namespace millrace::cuda::ptx {

#ifdef MILLRACE_HAS_WGMMA

// One width with A in registers: d [N / 2] (+)= a b. Only those below exist.
template <int kN>
struct WgmmaE4m3Registers;

#define MR_FLOAT(x) "+f"(x)
#define MR_E4M3_WIDTH(n, sums, o1, o2, o3, o4, o5)                                                          \
  template <>                                                                                               \
  struct WgmmaE4m3Registers<n> {                                                                            \
    __device__ static void multiply(float (&d)[sums], const uint32_t (&a)[4], uint64_t b, bool add) {       \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #o5 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #n \
                   "k32.f32.e4m3.e4m3 {" MR_T_##sums "}, {%" #sums ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 \
                                                     ", p, 1, 1;\n}"                                        \
                   : MR_D_##sums(MR_FLOAT)                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int32_t>(add)));   \
    }                                                                                                       \
  };

MR_E4M3_WIDTH(64, 32, 33, 34, 35, 36, 37)
MR_E4M3_WIDTH(128, 64, 65, 66, 67, 68, 69)

#undef MR_E4M3_WIDTH
#undef MR_FLOAT

// d (+)= a b of a warpgroup: 64 x 2 kSums outputs, 32 elements of K. a: lane (g, t) of warp w has columns
// 4t .. 4t + 3 of rows 16w + g and 16w + g + 8, then columns 16 + 4t .. of both; it may not change before the
// product is done.
template <int kSums>
__device__ inline void wgmma_e4m3(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  WgmmaE4m3Registers<2 * kSums>::multiply(d, a, b, accumulate);
}
// The same with a in shared memory too, K-major.
template <int kSums>
__device__ inline void wgmma_e4m3(float (&d)[kSums], uint64_t a, uint64_t b, bool accumulate) {
  DenseWgmma<WgmmaE4m3, 2 * kSums, false, false>::multiply(d, a, b, accumulate);
}

// Four numbers as codes, the first in the lowest byte; beyond 448: 448.
__device__ inline uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  uint32_t codes;
  asm("{\n .reg .b16 low, high;\n"
      " cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      " mov.b32 %0, {low, high};\n}"
      : "=r"(codes)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return codes;
}

#endif  // MILLRACE_HAS_WGMMA

}  // namespace millrace::cuda::ptx
