// GEMM of e4m3 matrices with a scale for every 1 x 128 elements of a and 128 x 128 of b: the mainloop is
// fp8_mainloop.cuh's.
//
// Roofline: as dense_wgmma.cu, at twice its rate: 1,024 cycles of the tensor cores a stage of 128 x 256, in
// which 32 KB come from L2 to a CTA of a cluster of two. Adding 64 sums to totals takes some 128 issue slots
// of each of four schedulers, beside 256 cycles of products.
#include "kernels/cuda/gemm/fp8_mainloop.cuh"

namespace millrace::cuda {
namespace {

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_dense_fp8_kernel(const __grid_constant__ DenseProblem p) {
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
    if (warp == 4 * Tile::kConsumers && lane == 0) produce(p, shared);
  } else {
    ptx::more_registers<Tile::kConsumerRegisters>();
    DenseCursor<Tile> at(shared, warpgroup);
    DensePanels<Tile> panels(shared, warpgroup, warp % 4, lane);
    const bool leader = panels.leader();
    const int rank = static_cast<int>(blockIdx.x % Tile::kCtas);
    tile::each_tile<Tile::kCtas>(p.order, [&](tile::TileOrder::At tile) {
      // Of a wide tile a warpgroup has all rows and half of the columns.
      constexpr bool kWide = Tile::kWaves == 2;
      const int row = (tile.m * Tile::kCtas + rank) * Tile::kRows + (kWide ? 0 : warpgroup * 64);
      const int column = tile.n * Tile::kColumns + (kWide ? warpgroup * 128 : 0);
#pragma unroll
      for (int wave = 0; wave < Tile::kWaves; ++wave)
        panels.template prefetch_residual<128>(p, row + 64 * wave, column);
      panels.warm_columns(p, column);
      Fp8Scales<Tile::kWaves> scales(p.a_scales, p.a_scale_stride, row + 16 * (warp % 4) + lane / 4, p.m - 1,
                                     p.b_scales + min(column, p.n - 1) / 128 * p.b_scale_stride, p.k_blocks,
                                     lane);
      float total[Tile::kWaves][64];
      multiply_tile(at, scales, p.k_blocks, leader, total);
#pragma unroll
      for (int wave = 0; wave < Tile::kWaves; ++wave) panels.store(p, total[wave], row + 64 * wave, column);
    });
    if (leader) ptx::bulk_store_wait();
  }
  tile::leave_cluster<Tile::kCtas>();
#else
  __trap();
#endif
}

}  // namespace

void launch_dense_fp8(const DenseGemm& op, const Launch& at) {
  // The tile whose waves take least: a wave of wide ones takes 1.95 times as long, and 2.3 stages to end.
  const auto waves = [&](int64_t rows, int64_t columns, int64_t slots) {
    return ((op.m + rows - 1) / rows * ((op.n + columns - 1) / columns) + slots - 1) / slots;
  };
  const int64_t sms = at.device.sm_count(), k_blocks = (op.k + 127) / 128;
  const bool wide = waves(256, 256, sms / 2) * (195 * k_blocks + 230) < waves(128, 128, sms) * 100 * k_blocks;
  if (op.tile == 1 || (op.tile == 0 && wide)) {
    using Tile = Fp8WideTile<2>;
    return launch_dense_tile<Tile>("gemm_dense_fp8_kernel", gemm_dense_fp8_kernel<Tile>, op, at);
  }
  using Tile = Fp8Tile<1>;
  launch_dense_tile<Tile>("gemm_dense_fp8_kernel", gemm_dense_fp8_kernel<Tile>, op, at);
}

}  // namespace millrace::cuda
