// GEMM of e2m1 operands with block scales: on sm_120a by mma.sync with block scales, elsewhere (but for
// sm_100a, fp4_tcgen05.cu) without tensor cores.
//
// A CTA has 128 x 128 outputs, eight warps 32 x 64 each. A stage is 256 columns of both operands, rows of 128
// bytes, 144 apart so that a fragment's eight rows lie in different banks; two stages, by asynchronous
// copies. Scales, one word of a row a step of 64 columns, come through L1.
//
// Roofline: a step of a warp is 16 products of m16n8k64 and 24 + 10 words loaded; nobody has measured it.
#include <cuda_fp8.h>

#include "kernels/cuda/gemm/fp4.h"
#include "kernels/cuda/gemm/lowbit_output.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "kernels/quant/fp4_fragments.h"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"
#include "millrace/kernels/tile/ptx/mma_16bit.cuh"
#include "millrace/kernels/tile/ptx/mma_fp4.cuh"

namespace millrace::cuda {
namespace {

constexpr int kTile = 128, kThreads = 256, kPitch = 144, kStages = 2;
[[maybe_unused]] constexpr int kStageBytes = 128;  // of a row
constexpr int kOperandBytes = kTile * kPitch;
constexpr int kSharedBytes = kStages * 2 * kOperandBytes;

#ifdef MILLRACE_HAS_FP4_MMA
// 128 rows x 128 bytes from byte `at` of rows `first` and on; zeros where there are none.
__device__ void load_rows(const uint8_t* from, int64_t rows, int64_t row_bytes, int64_t first, int64_t at,
                          uint8_t* to) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * (kStageBytes / 16); i += kThreads) {
    const int row = i / (kStageBytes / 16), chunk = i % (kStageBytes / 16) * 16;
    const bool there = first + row < rows && at + chunk < row_bytes;
    ptx::copy16_or_zero(to + row * kPitch + chunk,
                        there ? from + (first + row) * row_bytes + at + chunk : from, there);
  }
}
template <bool kNvfp4>
__device__ uint32_t load_scales(const uint8_t* scales, int64_t rows, int64_t row, int64_t k, int64_t step) {
  if (row >= rows || step * quant::kFp4StepColumns >= k) return 0;
  if constexpr (kNvfp4) return __ldg(reinterpret_cast<const uint32_t*>(scales + row * (k / 16)) + step);
  return __ldg(reinterpret_cast<const uint16_t*>(scales + row * (k / 32)) + step);
}
#endif

template <bool kNvfp4>
__global__ void __launch_bounds__(kThreads) gemm_fp4_mma_kernel(const Fp4Gemm p) {
#ifdef MILLRACE_HAS_FP4_MMA
  extern __shared__ __align__(16) uint8_t fp4_shared[];
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp / 2 * 32, warp_column = warp % 2 * 64;
  const int64_t first_row = int64_t{blockIdx.y} * kTile, first_column = int64_t{blockIdx.x} * kTile;
  const int64_t row_bytes = p.k / 2, stages = (row_bytes + kStageBytes - 1) / kStageBytes;
  const auto load = [&](int64_t stage) {
    uint8_t* to = fp4_shared + stage % kStages * 2 * kOperandBytes;
    if (stage < stages) {
      load_rows(p.a, p.m, row_bytes, first_row, stage * kStageBytes, to);
      load_rows(p.b, p.n, row_bytes, first_column, stage * kStageBytes, to + kOperandBytes);
    }
    ptx::copy_commit();
  };
  float sum[2][8][4] = {};
  load(0);
  for (int64_t stage = 0; stage < stages; ++stage) {
    load(stage + 1);
    ptx::copy_wait<1>();
    __syncthreads();  // the stage is there for every warp
    const uint8_t* a_rows = fp4_shared + stage % kStages * 2 * kOperandBytes;
    const uint8_t* b_rows = a_rows + kOperandBytes;
#pragma unroll
    for (int step = 0; step < kStageBytes / quant::kFp4StepBytes; ++step) {
      const int64_t k_step = stage * (kStageBytes / quant::kFp4StepBytes) + step;
      uint32_t a[2][4], a_scales[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = warp_row + 16 * i;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const quant::Fp4Word w = quant::fp4_a_word(lane, j);
          a[i][j] = *reinterpret_cast<const uint32_t*>(a_rows + (row + w.row) * kPitch +
                                                       step * quant::kFp4StepBytes + w.byte);
        }
        a_scales[i] =
            load_scales<kNvfp4>(p.a_scales, p.m, first_row + row + quant::fp4_a_scale_row(lane), p.k, k_step);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int column = warp_column + 8 * i;
        uint32_t b[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const quant::Fp4Word w = quant::fp4_b_word(lane, j);
          b[j] = *reinterpret_cast<const uint32_t*>(b_rows + (column + w.row) * kPitch +
                                                    step * quant::kFp4StepBytes + w.byte);
        }
        const uint32_t b_scales = load_scales<kNvfp4>(
            p.b_scales, p.n, first_column + column + quant::fp4_b_scale_row(lane), p.k, k_step);
        ptx::mma_fp4<kNvfp4>(sum[0][i], a[0], b, a_scales[0], b_scales);
        ptx::mma_fp4<kNvfp4>(sum[1][i], a[1], b, a_scales[1], b_scales);
      }
    }
    __syncthreads();  // every warp has read the stage
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int64_t row = first_row + warp_row + i / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
    const int64_t column = first_column + warp_column + i / 4 % 8 * 8 + lane % 4 * 2 + i % 2;
    if (row < p.m && column < p.n)
      store_out(p.c, row * p.ldc + column, p.out, p.alpha * sum[i / 32][i / 4 % 8][i % 4]);
  }
#else
  __trap();
#endif
}

// ---------------------------------------------------------------- any GPU

constexpr int kSmall = 32;

__device__ float fp4_value(const uint8_t* codes, const uint8_t* scales, int64_t row, int64_t k, int64_t at,
                           bool nvfp4) {
  const uint32_t code = codes[row * (k / 2) + at / 2] >> (4 * (at % 2)) & 15u;
  const uint32_t exponent = code >> 1 & 3u, mantissa = code & 1u;
  float value = exponent == 0
                    ? 0.5f * static_cast<float>(mantissa)
                    : static_cast<float>(2 + mantissa) * static_cast<float>(1u << (exponent - 1)) * 0.5f;
  if (code >= 8) value = -value;
  if (nvfp4) {
    __nv_fp8_e4m3 scale;
    scale.__x = scales[row * (k / 16) + at / 16];
    return value * static_cast<float>(scale);
  }
  return ldexpf(value, static_cast<int>(scales[row * (k / 32) + at / 32]) - 127);
}

__global__ void __launch_bounds__(kThreads) gemm_fp4_generic_kernel(const Fp4Gemm p) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  __shared__ float a[kSmall][kSmall + 1], b[kSmall][kSmall + 1];
  const int tx = static_cast<int>(threadIdx.x) % kSmall, ty = static_cast<int>(threadIdx.x) / kSmall;
  const int64_t across = (p.n + kSmall - 1) / kSmall, tiles = (p.m + kSmall - 1) / kSmall * across;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t row = tile / across * kSmall, column = tile % across * kSmall;
    float sum[4] = {};
    for (int64_t k = 0; k < p.k; k += kSmall) {
      for (int i = ty; i < kSmall; i += kThreads / kSmall) {
        const bool there = k + tx < p.k;
        a[i][tx] = there && row + i < p.m ? fp4_value(p.a, p.a_scales, row + i, p.k, k + tx, p.nvfp4) : 0.0f;
        b[tx][i] =
            there && column + i < p.n ? fp4_value(p.b, p.b_scales, column + i, p.k, k + tx, p.nvfp4) : 0.0f;
      }
      __syncthreads();
      for (int j = 0; j < kSmall; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) sum[r] = fmaf(a[ty + 8 * r][j], b[j][tx], sum[r]);
      }
      __syncthreads();
    }
    for (int r = 0; r < 4; ++r) {
      if (row + ty + 8 * r < p.m && column + tx < p.n)
        store_out(p.c, (row + ty + 8 * r) * p.ldc + column + tx, p.out, p.alpha * sum[r]);
    }
  }
}

template <bool kNvfp4>
void launch_mma(const Fp4Gemm& op, const Launch& at) {
  const auto kernel = gemm_fp4_mma_kernel<kNvfp4>;
  allow_shared_memory(kernel, kSharedBytes);
  launch_dependent("gemm_fp4_mma_kernel", kernel,
                   dim3(static_cast<unsigned>((op.n + kTile - 1) / kTile),
                        static_cast<unsigned>((op.m + kTile - 1) / kTile)),
                   kThreads, kSharedBytes, at, op);
}

}  // namespace

bool supports_fp4_mma(const Fp4Gemm& op, const Device& device) {
  if (device.code_architecture() != 120 || op.k % 64 != 0 || op.k == 0) return false;
  if ((op.m + kTile - 1) / kTile > 65535) return false;  // grid.y
  const auto aligned = [](const void* p, uintptr_t to) { return reinterpret_cast<uintptr_t>(p) % to == 0; };
  if (!aligned(op.a, 16) || !aligned(op.b, 16) || !aligned(op.a_scales, 4) || !aligned(op.b_scales, 4))
    return false;
  // Without sm_120a in the build, or on a GPU that runs only sm_120's code, the kernel is a trap, which takes
  // few registers.
  cudaFuncAttributes attributes{};
  check_call(cudaFuncGetAttributes(&attributes, gemm_fp4_mma_kernel<true>), "cudaFuncGetAttributes");
  return attributes.binaryVersion == 120 && attributes.numRegs > 64;
}

size_t fp4_workspace_bytes(const Fp4Gemm& op, const Device& device) {
  return supports_fp4_tcgen05(op, device) ? fp4_tcgen05_workspace_bytes(op) : 0;
}

void launch_fp4(const Fp4Gemm& op, void* workspace, const Launch& at) {
  if (op.m == 0 || op.n == 0) return;
  if (supports_fp4_tcgen05(op, at.device)) return launch_fp4_tcgen05(op, workspace, at);
  if (supports_fp4_mma(op, at.device)) return op.nvfp4 ? launch_mma<true>(op, at) : launch_mma<false>(op, at);
  launch_dependent("gemm_fp4_generic_kernel", gemm_fp4_generic_kernel,
                   dim3(static_cast<unsigned>(8 * at.device.sm_count())), kThreads, 0, at, op);
}

}  // namespace millrace::cuda
