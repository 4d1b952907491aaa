// Grouped GEMM of e4m3 rows and weights with a scale for every 1 x 128 elements of a row and 128 x 128 of an
// expert's weights: the mainloop of fp8_mainloop.cuh, items and loads of grouped_tile.cuh.
//
// Roofline: 1,024 cycles of the tensor cores a stage of 128 x 256 x 128, in which 40 KB come from L2, 40
// bytes a cycle; with few rows an expert the weights' bytes bind, at 128 rows 1,100 TFLOP/s.
#include "kernels/cuda/gemm/fp8_mainloop.cuh"
#include "kernels/cuda/gemm/grouped_tile.cuh"

namespace millrace::cuda {
namespace {

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_grouped_fp8_kernel(const __grid_constant__ GroupedProblem p) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ uint8_t raw[];
  const DenseShared<Tile> shared(raw);
  const int warp = static_cast<int>(ptx::warp_uniform(threadIdx.x / 32)), lane = threadIdx.x % 32;
  const int warpgroup = warp / 4;
  if (threadIdx.x == 0) shared.init();
  tile::sync_cluster<Tile::kCtas>();
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  if (warpgroup == Tile::kConsumers) {
    ptx::fewer_registers<Tile::kProducerRegisters>();
    if (warp == 4 * Tile::kConsumers && lane == 0) produce_grouped<Tile, false>(p, shared);
  } else {
    ptx::more_registers<Tile::kConsumerRegisters>();
    DenseCursor<Tile> at(shared, warpgroup);
    DensePanels<Tile> panels(shared, warpgroup, warp % 4, lane);
    const bool leader = panels.leader();
    GroupedCursor<Tile, false> cursor(p);
    GroupedItem item;
    for (int index = static_cast<int>(blockIdx.x) / Tile::kCtas; cursor.find(index, item);
         index += static_cast<int>(gridDim.x) / Tile::kCtas) {
      // Of a wide tile a warpgroup has all rows and half of the columns.
      constexpr bool kWide = Tile::kWaves == 2;
      const int first = kWide ? 0 : warpgroup * 64;
      item.column += kWide ? warpgroup * 128 : 0;
      Fp8Scales<Tile::kWaves> scales(p.dense.a_scales, p.dense.a_scale_stride,
                                     item.a_row + first + 16 * (warp % 4) + lane / 4, p.m - 1,
                                     p.dense.b_scales + item.expert * p.b_scales_per_expert +
                                         min(item.column, p.dense.n - 1) / 128 * p.dense.b_scale_stride,
                                     p.dense.k_blocks, lane);
      float total[Tile::kWaves][64];
      multiply_tile(at, scales, p.dense.k_blocks, leader, total);
#pragma unroll
      for (int wave = 0; wave < Tile::kWaves; ++wave)
        store_grouped(p, panels, item, first + 64 * wave, total[wave]);
    }
    if (leader) ptx::bulk_store_wait();
  }
  tile::leave_cluster<Tile::kCtas>();
#else
  __trap();
#endif
}

}  // namespace

void launch_grouped_fp8(const GroupedDense& op, const Launch& at) {
  using Tile = Fp8WideTile<2>;
  launch_grouped_tile<Tile>("gemm_grouped_fp8_kernel", gemm_grouped_fp8_kernel<Tile>, op, at);
}

}  // namespace millrace::cuda
