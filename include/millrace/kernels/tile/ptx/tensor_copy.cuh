// Tensor copies (TMA, sm_90 and later): one instruction loads or stores a box of a matrix that lies in rows,
// its shape described by a map that the host makes (tile/map.cuh). A bulk copy costs its warp some hundred
// cycles, however small: one box is worth many small ones.
#pragma once

#include <cuda.h>

#include "millrace/kernels/tile/ptx/barrier.cuh"

namespace millrace::cuda::ptx {

// The box at element (inner, outer) of the map to shared memory (128-byte aligned); completes on `barrier`.
__device__ inline void tma_load_box(void* to, const CUtensorMap* map, int32_t inner, int32_t outer,
                                    uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(shared_address(to)),
      "l"(map), "r"(inner), "r"(outer), "r"(shared_address(barrier))
      : "memory");
}
// The box from shared memory, published, to element (inner, outer): what lies outside is left out. Of this
// thread's group. Nobody waits until it is there: who reads it is a later kernel.
__device__ inline void tma_store_box(const CUtensorMap* map, int32_t inner, int32_t outer, const void* from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
               "r"(inner), "r"(outer), "r"(shared_address(from))
               : "memory");
}
// The same of maps of words, at byte `at` of row `row`.
__device__ inline void tma_load_2d(void* to, const CUtensorMap* map, int32_t at, int32_t row,
                                   uint64_t* barrier) {
  tma_load_box(to, map, at / 4, row, barrier);
}
__device__ inline void tma_store_2d(const CUtensorMap* map, int32_t at, int32_t row, const void* from) {
  tma_store_box(map, at / 4, row, from);
}

// The box at these coordinates, in elements, of a map of five dimensions.
__device__ inline void tma_load_5d(void* to, const CUtensorMap* map, int32_t at, int32_t row, int32_t c2,
                                   int32_t c3, int32_t c4, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
      "%5, %6}], "
      "[%7];" ::"r"(shared_address(to)),
      "l"(map), "r"(at), "r"(row), "r"(c2), "r"(c3), "r"(c4), "r"(shared_address(barrier))
      : "memory");
}

// The box from kilobyte `at` of row `row` on.
__device__ inline void tma_load_3d(void* to, const CUtensorMap* map, int32_t at, int32_t row,
                                   uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(shared_address(to)),
      "l"(map), "r"(0), "r"(at), "r"(row), "r"(shared_address(barrier))
      : "memory");
}
}  // namespace millrace::cuda::ptx
