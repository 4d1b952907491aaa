// Tensor copies (sm_90 and later): one instruction brings a box of a matrix that lies in rows, its shape
// described by a map that the host makes. A bulk copy costs its warp some hundred cycles, however small: many
// small ones are worth one box.
#pragma once

#include <cuda.h>

#include "backend/cuda/device.h"
#include "backend/cuda/ptx/barrier.cuh"

namespace millrace::cuda::ptx {

// [rows] of `row_bytes` (a multiple of 16), in boxes of box_rows x box_bytes (at most 1,024). What lies past
// the last row reads as zeros.
inline CUtensorMap byte_rows_map(const void* base, uint64_t rows, uint64_t row_bytes, uint32_t box_rows,
                                 uint32_t box_bytes) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check_call(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  CUtensorMap map{};
  const cuuint64_t sizes[2] = {row_bytes / 4, rows}, strides[1] = {row_bytes};
  const cuuint32_t box[2] = {box_bytes / 4, box_rows}, steps[2] = {1, 1};
  const CUresult status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 2, const_cast<void*>(base), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check_call(status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue, "cuTensorMapEncodeTiled");
  return map;
}

// The box at byte `at` of row `row` to shared memory (128-byte aligned); completes on `barrier`.
__device__ inline void box_copy(void* to, const CUtensorMap* map, int32_t at, int32_t row,
                                uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(shared_address(to)),
      "l"(map), "r"(at / 4), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

}  // namespace millrace::cuda::ptx
