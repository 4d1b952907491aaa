// Fragments of 16-bit matrices out of shared memory.
#pragma once

#include "kernels/cuda/ptx/barrier.cuh"

namespace millrace::cuda::ptx {

// Four 8 x 8 matrices: lane l gives the address of row l % 8 (16 bytes) of matrix l / 8, and gets elements 2t
// and 2t + 1 of row g of each.
__device__ inline void load_matrices(const void* row, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(shared_address(row))
               : "memory");
}

}  // namespace millrace::cuda::ptx
