// Grouped products (gemm/grouped.h) on any GPU and with any strides: 32 x 32 outputs of a CTA. For what the
// warpgroup kernels do not take; nobody asks it to be fast.
#include <cuda_fp8.h>

#include "kernels/cuda/gemm/group_schedule.cuh"
#include "kernels/cuda/gemm/grouped.h"
#include "kernels/cuda/gemm/lowbit_output.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

namespace millrace::cuda {
namespace {

constexpr int kTile = 32, kThreads = 256;

__device__ float element_at(const void* from, int64_t at, DenseType type) {
  if (type == DenseType::kBf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[at]);
  if (type == DenseType::kF16) return __half2float(static_cast<const __half*>(from)[at]);
  return static_cast<float>(static_cast<const __nv_fp8_e4m3*>(from)[at]);
}

// Element `k` of row `row` and of output `column`, both inside: of a and b.
__device__ float a_at(const GroupedDense& p, int64_t row, int64_t k) {
  return element_at(p.a, p.op == GroupedOp::kWgrad ? k * p.lda + row : row * p.lda + k, p.type);
}
__device__ float b_at(const GroupedDense& p, int64_t expert, int64_t column, int64_t k) {
  if (p.op == GroupedOp::kWgrad) return element_at(p.b, k * p.ldb + column, p.type);
  const int64_t n = p.op == GroupedOp::kForward ? column : k, c = p.op == GroupedOp::kForward ? k : column;
  return element_at(p.b, (expert * p.n + n) * p.ldb + c, p.type);
}

__global__ void __launch_bounds__(kThreads) gemm_grouped_generic_kernel(const GroupedDense p) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  __shared__ float a[kTile][kTile + 1], b[kTile][kTile + 1];
  const bool wgrad = p.op == GroupedOp::kWgrad;
  const int64_t columns = p.op == GroupedOp::kForward ? p.n : p.k;
  const auto column_tiles = static_cast<int32_t>((columns + kTile - 1) / kTile);
  const auto row_tiles = static_cast<int32_t>((p.n + kTile - 1) / kTile);  // wgrad
  GroupCursor cursor(wgrad ? nullptr : p.offsets, wgrad ? 1 : p.experts, static_cast<int32_t>(p.m), kTile,
                     column_tiles, 4);
  const int tx = static_cast<int>(threadIdx.x) % kTile, ty = static_cast<int>(threadIdx.x) / kTile;
  for (int index = static_cast<int>(blockIdx.x);; index += static_cast<int>(gridDim.x)) {
    GroupItem item;
    int64_t k_first = 0, k_last = p.op == GroupedOp::kForward ? p.k : p.n, c_row = 0;
    if (wgrad) {
      if (index >= p.experts * row_tiles * column_tiles) return;
      item.expert = index / (row_tiles * column_tiles);
      item.column_tile = index % column_tiles;
      item.first_row = index / column_tiles % row_tiles * kTile;
      item.rows = static_cast<int32_t>(min(int64_t{kTile}, p.n - item.first_row));
      k_first = p.offsets[item.expert], k_last = p.offsets[item.expert + 1];
      c_row = item.expert * p.n + item.first_row;
    } else {
      if (!cursor.find(index, item)) return;
      c_row = item.first_row;
    }
    const int64_t first_column = int64_t{item.column_tile} * kTile;
    float sum[4] = {}, total[4] = {};
    for (int64_t k = k_first; k < k_last; k += kTile) {
      for (int i = ty; i < kTile; i += kThreads / kTile) {
        const int64_t at = k + tx;
        a[i][tx] = i < item.rows && at < k_last ? a_at(p, item.first_row + i, at) : 0.0f;
        b[tx][i] =
            first_column + i < columns && at < k_last ? b_at(p, item.expert, first_column + i, at) : 0.0f;
      }
      __syncthreads();
      for (int j = 0; j < kTile; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) sum[r] = fmaf(a[ty + 8 * r][j], b[j][tx], sum[r]);
      }
      __syncthreads();
      if (p.a_scales != nullptr && ((k + kTile) % 128 == 0 || k + kTile >= k_last)) {
        const int64_t blocks = (p.k + 127) / 128;
        for (int r = 0; r < 4; ++r) {
          if (ty + 8 * r >= item.rows || first_column + tx >= columns) continue;
          const float scale =
              p.a_scales[(item.first_row + ty + 8 * r) * p.a_scale_stride + k / 128] *
              p.b_scales[(item.expert * ((p.n + 127) / 128) + (first_column + tx) / 128) * blocks + k / 128];
          total[r] = fmaf(sum[r], scale, total[r]);
          sum[r] = 0.0f;
        }
      }
    }
    for (int r = 0; r < 4; ++r) {
      if (ty + 8 * r >= item.rows || first_column + tx >= columns) continue;
      store_out(p.c, (c_row + ty + 8 * r) * p.ldc + first_column + tx, p.out,
                p.alpha * (p.a_scales != nullptr ? total[r] : sum[r]));
    }
  }
}

}  // namespace

void launch_grouped_generic(const GroupedDense& op, const Launch& at) {
  launch_dependent("gemm_grouped_generic_kernel", gemm_grouped_generic_kernel,
                   dim3(static_cast<unsigned>(8 * at.device.sm_count())), kThreads, 0, at, op);
}

bool supports_grouped_wgmma(const GroupedDense& op, const Device& device) {
  if (!device.has_wgmma() || op.n == 0 || op.k == 0) return false;
  const int64_t bytes = op.type == DenseType::kE4m3 ? 1 : 2, out = op.out == DenseOut::kF32 ? 4 : 2;
  const auto aligned = [](const void* p, int64_t row_bytes) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && row_bytes % 16 == 0;
  };
  constexpr int64_t kMost = int64_t{1} << 30;
  return aligned(op.a, op.lda * bytes) && aligned(op.b, op.ldb * bytes) && aligned(op.c, op.ldc * out) &&
         op.m < kMost && op.experts * op.n < kMost && op.k < kMost;
}

void launch_grouped_dense(const GroupedDense& op, const Launch& at) {
  const bool empty = op.op == GroupedOp::kWgrad ? op.experts * op.n * op.k == 0
                                                : op.m * (op.op == GroupedOp::kForward ? op.n : op.k) == 0;
  if (empty) return;
  if (op.m == 0 || op.kernel == 1 || !supports_grouped_wgmma(op, at.device))
    return launch_grouped_generic(op, at);
  op.type == DenseType::kE4m3 ? launch_grouped_fp8(op, at) : launch_grouped_wgmma(op, at);
}

}  // namespace millrace::cuda
