// Maps of tensor copies (tile/ptx/tensor_copy.cuh) in the shapes that the engine's kernels read, made by a
// Device.
#pragma once

#include <cuda.h>

#include "kernels/cuda/device.h"
#include "millrace/kernels/tile/ptx/tensor_copy.cuh"

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

}  // namespace millrace::cuda::ptx
