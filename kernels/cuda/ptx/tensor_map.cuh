// Tensor copies (TMA, sm_90 and later): one instruction loads a box of a matrix that lies in rows, its shape
// described by a map that the host makes. A bulk copy costs its warp some hundred cycles, however small: one
// box is worth many small ones.
#pragma once

#include <cuda.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/ptx/barrier.cuh"

namespace millrace::cuda::ptx {

// `sizes`, `strides` (in bytes, from the second dimension on) and `box` of words of four bytes.
inline CUtensorMap word_map(const Device& device, uint32_t rank, const void* base, const cuuint64_t* sizes,
                            const cuuint64_t* strides, const cuuint32_t* box) {
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(device.tensor_map_encoder());
  CUtensorMap map{};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT32, rank, const_cast<void*>(base), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check_call(status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue, "cuTensorMapEncodeTiled");
  return map;
}
// [rows] of `row_bytes` (a multiple of 16), in boxes of box_rows x box_bytes (at most 1,024). What lies past
// the last row reads as zeros.
inline CUtensorMap byte_rows_map(const Device& device, const void* base, uint64_t rows, uint64_t row_bytes,
                                 uint32_t box_rows, uint32_t box_bytes) {
  const cuuint64_t sizes[2] = {row_bytes / 4, rows}, strides[1] = {row_bytes};
  const cuuint32_t box[2] = {box_bytes / 4, box_rows};
  return word_map(device, 2, base, sizes, strides, box);
}
// The same for longer runs: rows of whole kilobytes, in boxes of box_rows x box_kilobytes.
inline CUtensorMap kilobyte_rows_map(const Device& device, const void* base, uint64_t rows,
                                     uint64_t row_kilobytes, uint32_t box_rows, uint32_t box_kilobytes) {
  const cuuint64_t sizes[3] = {256, row_kilobytes, rows}, strides[2] = {1024, row_kilobytes * 1024};
  const cuuint32_t box[3] = {256, box_kilobytes, box_rows};
  return word_map(device, 3, base, sizes, strides, box);
}

// Elements of 16 bits (or, `bytes`, of 8) in five dimensions, the first contiguous; strides in bytes, from
// the second dimension on. A box is `columns` x `rows` (x `more` of the
// third dimension); of 128 bytes in a row it lies in the 128-byte swizzle
// of wgmma.cuh. What lies outside of `sizes` reads as zeros and is not written.
inline CUtensorMap swizzled_map(const Device& device, const void* base, bool bytes,
                                const cuuint64_t (&sizes)[5], const cuuint64_t (&strides)[4],
                                uint32_t columns, uint32_t rows, uint32_t more = 1) {
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(device.tensor_map_encoder());
  CUtensorMap map{};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1}, box[5] = {columns, rows, more, 1, 1};
  const CUresult status = encode(&map, bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
                                 5, const_cast<void*>(base), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check_call(status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue, "cuTensorMapEncodeTiled");
  return map;
}

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
