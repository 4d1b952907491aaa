// A dense product as its tile's kernel takes it (dense_tile.cuh): tensor maps, the order of tiles, the
// launch.
#pragma once

#include "kernels/cuda/gemm/dense_tile.cuh"
#include "kernels/cuda/tile/launch.cuh"

namespace millrace::cuda {

// The map of a matrix of elements of `bytes`, [outer][inner] with rows `stride` elements apart, in boxes of
// box_outer x 128 (or 64) bytes, swizzled.
inline CUtensorMap dense_map(const Device& device, const void* base, int bytes, int64_t inner, int64_t outer,
                             int64_t stride, int box_outer, int box_bytes = 128) {
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(device.tensor_map_encoder());
  CUtensorMap map{};
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(outer)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride * bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_bytes / bytes), static_cast<cuuint32_t>(box_outer)};
  const cuuint32_t steps[2] = {1, 1};
  const CUtensorMapDataType type = bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  const CUresult status = encode(&map, type, 2, const_cast<void*>(base), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 box_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check_call(status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue, "cuTensorMapEncodeTiled");
  return map;
}

template <class Tile>
DenseProblem dense_problem(const DenseGemm& op, const Launch& at) {
  DenseProblem p{};
  constexpr int kBytes = Tile::kElementBytes;
  p.a = Tile::kTransposedA ? dense_map(at.device, op.a, kBytes, op.m, op.k, op.lda, 64)
                           : dense_map(at.device, op.a, kBytes, op.k, op.m, op.lda, Tile::kRows);
  p.b = Tile::kTransposedB
            ? dense_map(at.device, op.b, kBytes, op.n, op.k, op.ldb, 64)
            : dense_map(at.device, op.b, kBytes, op.k, op.n, op.ldb, Tile::kColumns / Tile::kCtas);
  const int64_t outputs = dense_outputs(op);
  const DenseEpilogue& e = op.epilogue;
  const bool aligned = reinterpret_cast<uintptr_t>(e.residual) % 16 == 0 && e.residual_stride % 8 == 0;
  const bool boxes = e.residual != nullptr && aligned && dense_out_bytes(e.out) == 2 &&
                     op.type != DenseType::kE4m3 && op.k > 0;
  p.residual_at = boxes ? (op.k > 2 * Tile::kStageK ? 2 : 0) : -1;
  if (boxes) p.residual = dense_map(at.device, e.residual, 2, outputs, op.m, e.residual_stride, 64);
  p.by_rows = e.residual != nullptr && !boxes;  // so that whole lines of it are read
  if (!p.by_rows)
    p.c = dense_map(at.device, op.c, dense_out_bytes(op.epilogue.out), outputs, op.m, op.ldc, 64);
  if (Tile::kEndsHalf && dense_out_bytes(e.out) == 2) {
    p.c_half = dense_map(at.device, op.c, 2, outputs, op.m, op.ldc, 64, 64);
    if (boxes)
      p.residual_half = dense_map(at.device, e.residual, 2, outputs, op.m, e.residual_stride, 64, 64);
  }
  p.epilogue = op.epilogue;
  p.out = op.c;
  p.ldc = op.ldc;
  p.m = static_cast<int32_t>(op.m);
  p.n = static_cast<int32_t>(op.n);
  p.outputs = static_cast<int32_t>(outputs);
  p.k_blocks = static_cast<int32_t>((op.k + Tile::kStageK - 1) / Tile::kStageK);
  p.gate_columns = is_gated(op.epilogue.activation) ? Tile::kColumns / 2 : 0;
  const int64_t rows = int64_t{Tile::kRows} * Tile::kCtas;
  const int64_t columns = p.gate_columns > 0 ? p.gate_columns : Tile::kColumns;
  // Groups of rows of tiles, so that the tiles in flight share operands in L2.
  p.order = {static_cast<int32_t>((op.m + rows - 1) / rows),
             static_cast<int32_t>((outputs + columns - 1) / columns), 16 / Tile::kCtas};
  p.a_scales = op.a_scales;
  p.b_scales = op.b_scales;
  p.a_scale_stride = op.a_scale_stride;
  p.b_scale_stride = op.b_scale_stride;
  return p;
}

template <class Tile, class Kernel>
void launch_dense_tile(const char* name, Kernel* kernel, const DenseGemm& op, const Launch& at) {
  const DenseProblem p = dense_problem<Tile>(op, at);
  const int clusters = at.device.sm_count() / Tile::kCtas;
  const int64_t tiles = p.order.count();
  const auto grid = static_cast<unsigned>((tiles < clusters ? tiles : clusters) * Tile::kCtas);
  allow_shared_memory(kernel, Tile::kBytes);
  launch_clusters(name, Tile::kCtas, kernel, dim3(grid), Tile::kThreads, Tile::kBytes, at, p);
}

}  // namespace millrace::cuda
