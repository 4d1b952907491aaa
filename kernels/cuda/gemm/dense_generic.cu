// Dense products (gemm/dense.h) on any GPU and with any strides: tiles of 64 x 64 outputs in shared memory, a
// thread has 4 x 4 of them. For what the warpgroup kernels do not take; nobody asks it to be fast.
#include <cuda_fp8.h>

#include "kernels/cuda/gemm/dense_epilogue.cuh"
#include "kernels/cuda/ptx/grid_dependency.cuh"
#include "kernels/cuda/tile/launch.cuh"

namespace millrace::cuda {
namespace {

constexpr int kTile = 64, kDepth = 16, kThreads = 256;

__device__ float load_element(const void* from, int64_t at, DenseType type) {
  switch (type) {
    case DenseType::kBf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[at]);
    case DenseType::kF16:
      return __half2float(static_cast<const __half*>(from)[at]);
    case DenseType::kF32:
      return static_cast<const float*>(from)[at];
    case DenseType::kE4m3:
      return static_cast<float>(static_cast<const __nv_fp8_e4m3*>(from)[at]);
    default:
      return static_cast<float>(static_cast<const int8_t*>(from)[at]);
  }
}

// Sum: int32_t for int8, which float32 would round from 2^24 on.
template <class Sum>
__global__ void __launch_bounds__(kThreads) gemm_dense_generic_kernel(const DenseGemm p) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  __shared__ float a[kDepth][kTile + 1], b[kDepth][kTile + 1];
  const int64_t first_row = int64_t{blockIdx.y} * kTile;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  for (int64_t first_column = int64_t{blockIdx.x} * kTile; first_column < p.n;
       first_column += int64_t{gridDim.x} * kTile) {
    Sum sum[4][4] = {};
    float total[4][4] = {};
    for (int64_t k = 0; k < p.k; k += kDepth) {
      for (int i = threadIdx.x; i < kDepth * kTile; i += kThreads) {
        const int64_t kk = k + i % kDepth, row = first_row + i / kDepth, column = first_column + i / kDepth;
        a[i % kDepth][i / kDepth] =
            kk < p.k && row < p.m
                ? load_element(p.a, p.mn_major_a ? kk * p.lda + row : row * p.lda + kk, p.type)
                : 0.0f;
        b[i % kDepth][i / kDepth] =
            kk < p.k && column < p.n
                ? load_element(p.b, p.mn_major_b ? kk * p.ldb + column : column * p.ldb + kk, p.type)
                : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kDepth; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if constexpr (sizeof(Sum) == 4 && Sum(0.5) == Sum(0)) {
              sum[r][c] += static_cast<Sum>(a[j][ty + 16 * r]) * static_cast<Sum>(b[j][tx + 16 * c]);
            } else {
              sum[r][c] = fmaf(a[j][ty + 16 * r], b[j][tx + 16 * c], sum[r][c]);
            }
          }
        }
      }
      __syncthreads();
      if (p.a_scales != nullptr && ((k + kDepth) % 128 == 0 || k + kDepth >= p.k)) {
        for (int r = 0; r < 4; ++r) {
          for (int c = 0; c < 4; ++c) {
            const int64_t row = first_row + ty + 16 * r, column = first_column + tx + 16 * c;
            if (row >= p.m || column >= p.n) continue;
            const float scale = p.a_scales[row * p.a_scale_stride + k / 128] *
                                p.b_scales[column / 128 * p.b_scale_stride + k / 128];
            total[r][c] = fmaf(static_cast<float>(sum[r][c]), scale, total[r][c]);
            sum[r][c] = Sum(0);
          }
        }
      }
    }
    for (int r = 0; r < 4; ++r) {
      for (int c = 0; c < 4; ++c) {
        const int64_t row = first_row + ty + 16 * r, column = first_column + tx + 16 * c;
        if (row >= p.m || column >= p.n) continue;
        const float value = p.a_scales != nullptr ? total[r][c] : static_cast<float>(sum[r][c]);
        const float y = dense_output(p.epilogue, value, row, column);
        const int64_t at = row * p.ldc + column;
        if (p.epilogue.out == DenseOut::kF32) static_cast<float*>(p.c)[at] = y;
        if (p.epilogue.out == DenseOut::kBf16) static_cast<__nv_bfloat16*>(p.c)[at] = __float2bfloat16_rn(y);
        if (p.epilogue.out == DenseOut::kF16) static_cast<__half*>(p.c)[at] = __float2half_rn(y);
      }
    }
  }
}

}  // namespace

void launch_dense_generic(const DenseGemm& op, const Launch& at) {
  if (op.m == 0 || op.n == 0) return;
  const auto rows = static_cast<unsigned>((op.m + kTile - 1) / kTile);
  const auto columns = static_cast<unsigned>((op.n + kTile - 1) / kTile);
  // grid.y ends at 65,535: more rows than that go in several launches.
  constexpr unsigned kMostRows = 65535;
  for (unsigned first = 0; first < rows; first += kMostRows) {
    DenseGemm part = op;
    const int64_t skip = int64_t{first} * kTile;
    const int element = dense_bytes(op.type);
    const int out = op.epilogue.out == DenseOut::kF32 ? 4 : 2;
    part.m = op.m - skip;
    part.a = static_cast<const uint8_t*>(op.a) + (op.mn_major_a ? skip : skip * op.lda) * element;
    part.c = static_cast<uint8_t*>(op.c) + skip * op.ldc * out;
    if (op.a_scales != nullptr) part.a_scales = op.a_scales + skip * op.a_scale_stride;
    if (op.epilogue.row_scales != nullptr) part.epilogue.row_scales = op.epilogue.row_scales + skip;
    if (op.epilogue.residual != nullptr)
      part.epilogue.residual =
          static_cast<const uint8_t*>(op.epilogue.residual) + skip * op.epilogue.residual_stride * out;
    const dim3 grid(columns < kMostRows ? columns : kMostRows,
                    rows - first < kMostRows ? rows - first : kMostRows);
    if (op.type == DenseType::kS8) {
      launch_dependent("gemm_dense_generic_kernel", gemm_dense_generic_kernel<int32_t>, grid, kThreads, 0, at,
                       part);
    } else {
      launch_dependent("gemm_dense_generic_kernel", gemm_dense_generic_kernel<float>, grid, kThreads, 0, at,
                       part);
    }
  }
}

bool supports_dense_wgmma(const DenseGemm& op, const Device& device) {
  if (!device.has_wgmma() || op.m == 0 || op.n == 0 || op.k == 0 || op.type == DenseType::kF32) return false;
  const int64_t bytes = dense_bytes(op.type);
  const int64_t out = op.epilogue.out == DenseOut::kF32 ? 4 : 2;
  if (bytes == 1 && (op.mn_major_a || op.mn_major_b)) return false;
  if (op.mn_major_a && !op.mn_major_b) return false;  // TT: no layer's product
  const auto aligned = [](const void* p, int64_t row_bytes) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && row_bytes % 16 == 0;
  };
  constexpr int64_t kMost = int64_t{1} << 30;
  return aligned(op.a, op.lda * bytes) && aligned(op.b, op.ldb * bytes) && aligned(op.c, op.ldc * out) &&
         op.m < kMost && op.n < kMost && op.k < kMost;
}

void launch_dense(const DenseGemm& op, const Launch& at) {
  if (!supports_dense_wgmma(op, at.device)) return launch_dense_generic(op, at);
  if (op.type == DenseType::kE4m3) return launch_dense_fp8(op, at);
  launch_dense_wgmma(op, at);
}

}  // namespace millrace::cuda
