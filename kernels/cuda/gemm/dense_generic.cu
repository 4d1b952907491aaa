// Dense products (gemm/dense.h) on any GPU and with any strides: tiles of 64 x 64 outputs in shared memory, a
// thread has 4 x 4 of them. For what the warpgroup kernels do not take; nobody asks it to be fast.
#include <cuda_fp8.h>

#include "kernels/cuda/gemm/dense_epilogue.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

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

// The output of row `row`, column `column`, both inside, of its sum.
__device__ void finish_one(const DenseGemm& p, float sum, int64_t row, int64_t column) {
  const DenseEpilogue& e = p.epilogue;
  float x = e.alpha * sum;
  if (e.row_scales != nullptr) x *= e.row_scales[row];
  if (e.column_scales != nullptr) x *= e.column_scales[column];
  if (e.bias != nullptr) x += e.bias[column];
  Float4 y{{x, 0.0f, 0.0f, 0.0f}};
  with_activation(e.activation, [&]<DenseActivation kActivation>() { dense_activate<kActivation>(y); });
  if (e.residual != nullptr) y.v[0] += load_out(e.residual, row * e.residual_stride + column, e.out);
  const int64_t at = row * p.ldc + column;
  if (e.out == DenseOut::kF32) static_cast<float*>(p.c)[at] = y.v[0];
  if (e.out == DenseOut::kBf16) static_cast<__nv_bfloat16*>(p.c)[at] = __float2bfloat16_rn(y.v[0]);
  if (e.out == DenseOut::kF16) static_cast<__half*>(p.c)[at] = __float2half_rn(y.v[0]);
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
        finish_one(p, value, row, column);
      }
    }
  }
}

// A warp has 128 outputs of a row: sums [m][n].
__global__ void __launch_bounds__(kThreads) dense_finish_kernel(const float* sums, const DenseGemm p) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const DenseEpilogue& e = p.epilogue;
  const bool gated = is_gated(e.activation);
  const auto n = static_cast<int32_t>(p.n), outputs = gated ? n / 2 : n;
  const DenseStore out(e, p.c, p.ldc, outputs);
  const int64_t blocks = (outputs + 127) / 128, warps = int64_t{gridDim.x} * (kThreads / 32);
  for (int64_t i = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; i < p.m * blocks; i += warps) {
    const int64_t row = i / blocks;
    const auto column = static_cast<int32_t>(i % blocks * 128 + threadIdx.x % 32 * 4);
    const auto load = [&](int32_t at, int32_t past) {
      Float4 y = load_columns(sums + row * n, at, past);
      const Float4 bias = load_columns(e.bias, at, past);
      for (int k = 0; k < 4; ++k) y.v[k] += bias.v[k];
      return y;
    };
    Float4 y = load(column, outputs);
    with_activation(e.activation, [&]<DenseActivation kActivation>() {
      if constexpr (is_gated(kActivation)) {
        y = dense_gate<kActivation>(e, y, load(column + outputs, n));
      } else {
        dense_activate<kActivation>(y);
      }
    });
    if (e.residual != nullptr) out.add_residual(y, out.load_residual(row, column));
    out.store(y, row, column);
  }
}

// Whether the sums go to memory first: gates that no kernel has side by side, scales of outputs that no
// kernel has in one warp.
bool goes_by_workspace(const DenseGemm& op, const Device& device) {
  const bool gated = is_gated(op.epilogue.activation);
  if (!gated && op.epilogue.out != DenseOut::kE4m3) return false;
  return !supports_dense_wgmma(op, device) || (gated && op.type == DenseType::kE4m3);
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
    const int out = dense_out_bytes(op.epilogue.out);
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

void launch_dense_finish(const float* sums, const DenseGemm& op, const Launch& at) {
  const int64_t blocks = (dense_outputs(op) + 127) / 128 * op.m,
                ctas = (blocks + kThreads / 32 - 1) / (kThreads / 32);
  if (ctas == 0) return;
  constexpr int64_t kMostCtas = 1 << 16;
  launch_dependent("dense_finish_kernel", dense_finish_kernel,
                   dim3(static_cast<unsigned>(ctas < kMostCtas ? ctas : kMostCtas)), kThreads, 0, at, sums,
                   op);
}

bool supports_dense_wgmma(const DenseGemm& op, const Device& device) {
  if (!device.has_wgmma() || op.m == 0 || op.n == 0 || op.k == 0 || op.type == DenseType::kF32) return false;
  const int64_t bytes = dense_bytes(op.type);
  const int64_t out = dense_out_bytes(op.epilogue.out);
  if (bytes == 1 && (op.mn_major_a || op.mn_major_b)) return false;
  if (op.mn_major_a && !op.mn_major_b) return false;  // TT: no layer's product
  const auto aligned = [](const void* p, int64_t row_bytes) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && row_bytes % 16 == 0;
  };
  constexpr int64_t kMost = int64_t{1} << 30;
  return aligned(op.a, op.lda * bytes) && aligned(op.b, op.ldb * bytes) && aligned(op.c, op.ldc * out) &&
         op.m < kMost && op.n < kMost && op.k < kMost;
}

size_t dense_workspace_bytes(const DenseGemm& op, const Device& device) {
  return goes_by_workspace(op, device) ? static_cast<size_t>(op.m) * static_cast<size_t>(op.n) * 4 : 0;
}

void launch_dense(const DenseGemm& op, const Launch& at, void* workspace) {
  if (goes_by_workspace(op, at.device)) {
    DenseGemm sums = op;  // with the factors, up to the bias
    sums.epilogue = {};
    sums.epilogue.alpha = op.epilogue.alpha;
    sums.epilogue.row_scales = op.epilogue.row_scales;
    sums.epilogue.column_scales = op.epilogue.column_scales;
    sums.c = workspace;
    sums.ldc = op.n;
    launch_dense(sums, at);
    return launch_dense_finish(static_cast<const float*>(workspace), op, at);
  }
  if (!supports_dense_wgmma(op, at.device)) return launch_dense_generic(op, at);
  if (op.type == DenseType::kE4m3) return launch_dense_fp8(op, at);
  launch_dense_wgmma(op, at);
}

}  // namespace millrace::cuda
