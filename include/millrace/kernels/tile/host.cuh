// What a kernel of tiles needs from its host: maps of matrices for tensor copies, and a launch with clusters.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>
#include <utility>

namespace millrace::tile {

// The maps of a kernel's matrices: a parameter of it, const and __grid_constant__, since copies read them
// there.
template <int kCount>
struct Maps {
  CUtensorMap map[kCount];
  __host__ __device__ CUtensorMap& operator[](int i) { return map[i]; }
  __host__ __device__ const CUtensorMap& operator[](int i) const { return map[i]; }
};

// The map of a matrix [rows][columns] of 1, 2 or 4 bytes an element, rows `stride` elements apart, for tiles
// of box_rows (at most 256) rows: boxes of box_rows x 128 bytes in 128-byte swizzle. `data` and rows are
// 16-byte aligned. What lies outside reads as zeros and is not written. False: the driver does not take it.
template <class Element>
bool make_map(CUtensorMap& map, const Element* data, int64_t rows, int64_t columns, int64_t stride,
              int box_rows) {
  static_assert(sizeof(Element) <= 4);
  void* encoder = nullptr;
  cudaDriverEntryPointQueryResult found{};
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encoder, 12000, cudaEnableDefault,
                                       &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    return false;
  }
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * sizeof(Element)};
  const cuuint32_t box[2] = {128 / sizeof(Element), static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const CUtensorMapDataType type = sizeof(Element) == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : sizeof(Element) == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encoder)(
             &map, type, 2, const_cast<std::remove_const_t<Element>*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// As many blocks of `cluster` as the GPU has SMs for, or fewer.
inline int persistent_blocks(int64_t tiles, int cluster = 1) {
  int device = 0, sms = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return 0;  // the launch fails, with the reason
  }
  const int64_t clusters = sms / cluster;
  return static_cast<int>(tiles < clusters ? tiles : clusters) * cluster;
}

// kernel<<<blocks, threads>>> with dynamic shared memory and clusters of `cluster` blocks.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int blocks, int threads, int shared_bytes, int cluster,
                   cudaStream_t stream, Arguments&&... arguments) {
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      error != cudaSuccess) {
    return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(std::forward<Arguments>(arguments))...);
}

// How long `run` takes on the default stream, of `count` runs after three that are not counted; 0: it failed.
template <class Run>
float milliseconds(Run&& run, int count) {
  cudaEvent_t begin{}, end{};
  if (cudaEventCreate(&begin) != cudaSuccess || cudaEventCreate(&end) != cudaSuccess) return 0.0f;
  for (int i = -3; i < count; ++i) {
    if (i == 0) cudaEventRecord(begin);
    run();
  }
  cudaEventRecord(end);
  float all = 0.0f;
  if (cudaDeviceSynchronize() != cudaSuccess || cudaEventElapsedTime(&all, begin, end) != cudaSuccess)
    all = 0.0f;
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return all / static_cast<float>(count);
}

}  // namespace millrace::tile
