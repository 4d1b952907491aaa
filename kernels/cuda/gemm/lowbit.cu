// Four-bit weights: repacking what is published into units, a product for any GPU and alignment, and which
// kernel a product goes to. Repacking is bound by the bytes read and written, done once, and not tuned.
#include "kernels/cuda/gemm/lowbit.h"

#include "kernels/cuda/gemm/group_schedule.cuh"
#include "kernels/cuda/gemm/lowbit_format.cuh"
#include "kernels/cuda/gemm/lowbit_output.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

namespace millrace::cuda {
namespace {

constexpr int kTile = 32, kThreads = 256;

// A CTA packs a unit.
__global__ void __launch_bounds__(kThreads) lowbit_repack_kernel(const mr_lowbit_matrix from, uint8_t* to) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const quant::UnitGrid grid(from.n, from.k);
  const int groups = quant::kUnitColumns / quant::lowbit_group(from.format);
  for (int64_t i = blockIdx.x; i < from.experts * grid.units(); i += gridDim.x) {
    const int64_t expert = i / grid.units(), tile = i % grid.units() / grid.column_units,
                  column_unit = i % grid.column_units;
    uint8_t* unit = to + i * quant::unit_bytes(from.format);
    for (int at = static_cast<int>(threadIdx.x); at < quant::kUnitWords; at += kThreads)
      reinterpret_cast<uint32_t*>(unit)[at] = quant::pack_unit_word(from, expert, tile, column_unit, at);
    for (int at = static_cast<int>(threadIdx.x); at < groups * quant::kUnitRows; at += kThreads)
      quant::pack_unit_scale(from, expert, tile, column_unit, at / quant::kUnitRows, at % quant::kUnitRows,
                             unit);
  }
}

// The weight in row n, column k, unscaled; of an expert's units.
template <mr_lowbit_format kFormat>
__device__ float weight_at(const uint8_t* units, int64_t column_units, int64_t n, int64_t k) {
  const uint8_t* unit =
      units + (n / quant::kUnitRows * column_units + k / quant::kUnitColumns) * quant::unit_bytes(kFormat);
  const int row = static_cast<int>(n % quant::kUnitRows), column = static_cast<int>(k % quant::kUnitColumns);
  uint32_t w[4];
  LowbitWeights<kFormat>::load(unit, column / 16, row / 16, row % 8 * 4 + column % 8 / 2, w);
  const __nv_bfloat162 pair = lowbit::as_bf16(w[row / 8 % 2 + column / 8 % 2 * 2]);
  return column % 2 == 0 ? __low2float(pair) : __high2float(pair);
}

// 32 x 32 outputs of a CTA, a thread has four of a column.
template <mr_lowbit_format kFormat>
__global__ void __launch_bounds__(kThreads) gemm_lowbit_generic_kernel(const LowbitGemm op) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  __shared__ float a[kTile][kTile + 1], b[kTile][kTile + 1];
  const quant::UnitGrid grid(op.n, op.k);
  const auto* x = static_cast<const __nv_bfloat16*>(op.x);
  GroupCursor cursor(op.offsets, op.experts, static_cast<int32_t>(op.m), kTile,
                     static_cast<int32_t>((op.outputs() + kTile - 1) / kTile), 4);
  GroupItem item;
  const int tx = static_cast<int>(threadIdx.x) % kTile, ty = static_cast<int>(threadIdx.x) / kTile;
  for (int index = static_cast<int>(blockIdx.x); cursor.find(index, item);
       index += static_cast<int>(gridDim.x)) {
    const uint8_t* units = op.weights + item.expert * grid.units() * quant::unit_bytes(kFormat);
    const int64_t first_output = int64_t{item.column_tile} * kTile;
    float sum[4] = {};
    for (int64_t k = 0; k < op.reduced(); k += kTile) {
      for (int i = ty; i < kTile; i += kThreads / kTile) {
        const int64_t output = first_output + i, at = k + tx;
        a[i][tx] = i < item.rows && at < op.reduced()
                       ? __bfloat162float(x[(item.first_row + i) * op.ldx + at])
                       : 0.0f;
        b[tx][i] = output < op.outputs() && at < op.reduced()
                       ? weight_at<kFormat>(units, grid.column_units, op.backward ? at : output,
                                            op.backward ? output : at)
                       : 0.0f;
      }
      __syncthreads();
      for (int j = 0; j < kTile; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) sum[r] = fmaf(a[ty + 8 * r][j], b[j][tx], sum[r]);
      }
      __syncthreads();
    }
    for (int r = 0; r < 4; ++r) {
      if (ty + 8 * r >= item.rows || first_output + tx >= op.outputs()) continue;
      store_lowbit(op, sum[r] * LowbitWeights<kFormat>::kUnscale, item.expert, item.first_row + ty + 8 * r,
                   first_output + tx);
    }
  }
}

template <mr_lowbit_format kFormat>
void launch_generic_as(const LowbitGemm& op, const Launch& at) {
  launch_dependent("gemm_lowbit_generic_kernel", gemm_lowbit_generic_kernel<kFormat>,
                   dim3(static_cast<unsigned>(8 * at.device.sm_count())), kThreads, 0, at, op);
}

bool aligned(const void* p, int64_t row_bytes, uintptr_t to) {
  return reinterpret_cast<uintptr_t>(p) % to == 0 && row_bytes % static_cast<int64_t>(to) == 0;
}
bool takes_gemv(const LowbitGemm& op, const Device& device) {
  return device.has_wgmma() && op.k > 0 && !op.backward && op.offsets == nullptr && op.m <= kLowbitGemvRows &&
         aligned(op.x, op.ldx * 2, 4);
}
bool takes_wgmma(const LowbitGemm& op, const Device& device) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return device.has_wgmma() && op.reduced() > 0 && aligned(op.x, op.ldx * 2, 16) && op.n < kMost &&
         op.k < kMost && op.m < kMost;
}

}  // namespace

void launch_lowbit_repack(const mr_lowbit_matrix& from, uint8_t* to, const Launch& at) {
  const int64_t units = from.experts * quant::UnitGrid(from.n, from.k).units();
  if (units == 0) return;
  const int64_t ctas = units < 65536 ? units : 65536;
  launch_dependent("lowbit_repack_kernel", lowbit_repack_kernel, dim3(static_cast<unsigned>(ctas)), kThreads,
                   0, at, from, to);
}

void launch_lowbit_generic(const LowbitGemm& op, const Launch& at) {
  switch (op.format) {
    case MR_LOWBIT_MXFP4:
      return launch_generic_as<MR_LOWBIT_MXFP4>(op, at);
    case MR_LOWBIT_NVFP4:
      return launch_generic_as<MR_LOWBIT_NVFP4>(op, at);
    case MR_LOWBIT_INT4_32:
      return launch_generic_as<MR_LOWBIT_INT4_32>(op, at);
    default:
      return launch_generic_as<MR_LOWBIT_INT4_128>(op, at);
  }
}

size_t lowbit_workspace_bytes(const LowbitGemm& op, const Device& device) {
  const int64_t segment = int64_t{quant::kSegmentUnits} * quant::kUnitColumns;
  if (op.reduced() <= segment || op.m == 0) return 0;
  if (takes_gemv(op, device))
    return static_cast<size_t>((op.k + segment - 1) / segment * op.m * op.n) * sizeof(float);
  if (!takes_wgmma(op, device)) return 0;
  return static_cast<size_t>(device.sm_count()) * 128 * 256 * sizeof(float);  // a tile of outputs each
}

void launch_lowbit(const LowbitGemm& op, const Launch& at) {
  if (op.m == 0 || op.outputs() == 0) return;
  if (op.kernel == 3 || (op.kernel == 0 && takes_gemv(op, at.device))) return launch_lowbit_gemv(op, at);
  if (op.kernel == 1 || !takes_wgmma(op, at.device)) return launch_lowbit_generic(op, at);
  switch (op.format) {
    case MR_LOWBIT_MXFP4:
      return launch_lowbit_wgmma<MR_LOWBIT_MXFP4>(op, at);
    case MR_LOWBIT_NVFP4:
      return launch_lowbit_wgmma<MR_LOWBIT_NVFP4>(op, at);
    case MR_LOWBIT_INT4_32:
      return launch_lowbit_wgmma<MR_LOWBIT_INT4_32>(op, at);
    default:
      return launch_lowbit_wgmma<MR_LOWBIT_INT4_128>(op, at);
  }
}

}  // namespace millrace::cuda
