// Warp matrix products, and the loads of their fragments from shared memory. A lane is (g, t) = (lane / 4,
// lane % 4).
//   m16n8k32, 8-bit: a[0] row g k 4t..4t+3, a[1] row g + 8, a[2], a[3] the same at k + 16; b[0] column g
//   k 4t..4t+3, b[1] at k + 16; c[0], c[1] row g columns 2t, 2t + 1; c[2], c[3] row g + 8.
//   m16n8k16, bf16: a[0] row g k 2t, 2t + 1, a[1] row g + 8, a[2], a[3] the same at k + 8; b[0] column g k
//   2t, 2t + 1, b[1] at k + 8; c as above.
#pragma once

#include <cstdint>

#include "millrace/kernels/tile/ptx/barrier.cuh"

namespace millrace::cuda::ptx {

// d = c + a b, exact, both signed.
__device__ inline void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              const int32_t (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]),
        "r"(c[3]));
}

// d += a b in float32.
__device__ inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit elements, rows of 16 aligned bytes; lane l gives the address of row l % 8 of
// matrix l / 8. Lane (g, t) gets of each row g, columns 2t and 2t + 1: a[0] or b[0] of the above.
__device__ inline uint4 ldmatrix_x4(const void* row) {
  uint4 m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
               : "r"(shared_address(row))
               : "memory");
  return m;
}
// The same, transposed: rows 2t and 2t + 1 of column g.
__device__ inline uint4 ldmatrix_x4_transposed(const void* row) {
  uint4 m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
               : "r"(shared_address(row))
               : "memory");
  return m;
}

// An 8 x 8 matrix of 16-bit elements, a row's columns 2t and 2t + 1 in lane (row, t), transposed.
__device__ inline uint32_t transpose_matrix(uint32_t a) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
// The same, where the compiler may move it among others: in code that all lanes go through.
__device__ inline uint32_t transpose_matrix_anywhere(uint32_t a) {
  uint32_t d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

}  // namespace millrace::cuda::ptx
