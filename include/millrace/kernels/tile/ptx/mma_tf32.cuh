// Warp matrix products of TF32: float32 with ten bits of mantissa, sums in float32. A lane is (g, t) = (lane
// / 4, lane % 4).
//   m16n8k8: a[0] row g k t, a[1] row g + 8, a[2], a[3] the same at k + 4; b0 column g k t, b1 at k + 4;
//   c[0], c[1] row g columns 2t, 2t + 1; c[2], c[3] row g + 8.
#pragma once

#include <cstdint>

namespace millrace::cuda::ptx {

// d += a b.
__device__ inline void mma_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// The nearest TF32, ties away from zero: what a product reads of x. Rounding it again changes nothing.
__device__ inline float round_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

}  // namespace millrace::cuda::ptx
