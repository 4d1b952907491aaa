// Rows of activations, with RMS norm or without, rounded to bf16 and stored as GEMM operands, one CTA per
// row. Roofline: memory, 4 bytes read and 2 written per element and copy; rows of a batch are in L2.
#include "kernels/cuda/gemm/round_rows.h"

#include "kernels/cuda/gemv/row.cuh"
#include "kernels/cuda/moe/gelu.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"
#include "millrace/kernels/tile/ptx/wgmma.cuh"

namespace millrace::cuda {
namespace {

// Quad q of row i: two neighbours each, where column_position has them.
__device__ inline void store_quad(PackedFormat weights, const Bf16Rows& rows, int64_t i, int k_steps, int q,
                                  uint2 words, bool swizzled) {
  const auto first = static_cast<uint32_t>(q % 16 * 4);
  const uint32_t at[2] = {column_position(weights, first), column_position(weights, first + 2)};
  const uint32_t word[2] = {words.x, words.y};
  if (swizzled) {
    uint8_t* tile = rows.data + (i / kWgmmaRows * k_steps + q / 16) * kWgmmaTileBytes;
    const auto row = static_cast<uint32_t>(i % kWgmmaRows);
#pragma unroll
    for (int j = 0; j < 2; ++j) *reinterpret_cast<uint32_t*>(tile + ptx::swizzled(row, at[j] * 2)) = word[j];
    return;
  }
  // [step][lane] of rows g, g + 8 of columns 2t and 2t + 1, then of columns 2t + 8 and 2t + 9.
  uint8_t* tile = rows.data + (i / kWarpRows * k_steps + q / 16) * (4 * kWarpLanes * 16);
  const auto row = static_cast<uint32_t>(i % kWarpRows);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t lane = row % 8 * 4 + at[j] % 8 / 2;
    *reinterpret_cast<uint32_t*>(tile + (at[j] / 16 * kWarpLanes + lane) * 16 + at[j] % 16 / 8 * 8 +
                                 row / 8 * 4) = word[j];
  }
}

// One CTA per row.
__global__ void __launch_bounds__(kRoundThreads)
    round_rows_kernel(const __grid_constant__ RoundRows op, bool swizzled) {
  __shared__ float partial[kRoundWarps];
  ptx::let_dependents_start();
  const int cols = static_cast<int>(op.cols), k_steps = packed_k_steps(cols);
  RowQuads weight;
  weight.load<false>(op.norm_weight, cols / 4);
  ptx::wait_for_previous();
  const int64_t i = blockIdx.x, source = op.source_rows != nullptr ? op.source_rows[i] : i;
  round_rows<1>(
      1, [&](int) { return op.x + source * op.cols; }, op.norm_weight, weight, op.eps, cols, partial,
      [&](int, int q, uint2 words) {
        for (int c = 0; c < op.copies; ++c) {
          const int64_t to = op.sorted_rows != nullptr ? __ldg(op.sorted_rows + i * op.copies + c) : i;
          store_quad(op.weights, op.to, to, k_steps, q, words, swizzled);
        }
      });
}

// One CTA per row.
__global__ void __launch_bounds__(kRoundThreads)
    round_gated_kernel(const __grid_constant__ RoundGated op, bool swizzled) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int cols = static_cast<int>(op.cols), k_steps = packed_k_steps(cols);
  const int64_t i = blockIdx.x;
  const auto* gate = reinterpret_cast<const float4*>(op.gate + i * op.cols);
  const auto* up = reinterpret_cast<const float4*>(op.up + i * op.cols);
  for (int q = static_cast<int>(threadIdx.x); q < k_steps * (kKStepColumns / 4); q += kRoundThreads) {
    uint2 words = {0u, 0u};
    if (q < cols / 4) {
      const float4 g = __ldcg(gate + q), u = __ldcg(up + q);
      words = rounded_quad({activate_kind(op.kind, g.x) * u.x, activate_kind(op.kind, g.y) * u.y,
                            activate_kind(op.kind, g.z) * u.z, activate_kind(op.kind, g.w) * u.w});
    }
    store_quad(op.weights, op.to, i, k_steps, q, words, swizzled);
  }
}

}  // namespace

size_t bf16_rows_bytes(int64_t rows, int64_t cols, const Device& device) {
  const int64_t tile_rows = gemm_tile_rows(device), padded = (rows + tile_rows - 1) / tile_rows * tile_rows;
  return static_cast<size_t>(padded) * static_cast<size_t>(packed_k_steps(cols)) * kKStepColumns * 2;
}

void launch_round_rows(const RoundRows& op, const Launch& at) {
  if (op.rows == 0) return;
  launch_dependent("round_rows_kernel", round_rows_kernel, dim3(static_cast<unsigned>(op.rows)),
                   kRoundThreads, 0, at, op, at.device.has_wgmma());
}

void launch_round_gated(const RoundGated& op, const Launch& at) {
  if (op.rows == 0) return;
  launch_dependent("round_gated_kernel", round_gated_kernel, dim3(static_cast<unsigned>(op.rows)),
                   kRoundThreads, 0, at, op, at.device.has_wgmma());
}

}  // namespace millrace::cuda
