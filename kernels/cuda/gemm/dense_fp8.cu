// GEMM of e4m3 matrices with a scale for every 1 x 128 elements of a and 128 x 128 of b (DeepSeek V3's
// recipe): the tensor cores sum 128 of K, whose sums are multiplied with both scales and added to float32
// totals. (Hopper's e4m3 products keep some 14 bits of a sum: chains of 128 bound what that costs.)
//
// Roofline: as dense_wgmma.cu, at twice its rate; 128 x 128 outputs, since a thread has 64 sums and 64
// totals. Adding 64 sums to totals takes some 128 issue slots of each of four schedulers a stage, beside 512
// cycles of products: the two warpgroups take turns at them.
#include "kernels/cuda/gemm/dense_tile.cuh"

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
      const int row = (tile.m * Tile::kCtas + rank) * Tile::kRows + warpgroup * 64;
      const int column = tile.n * Tile::kColumns;
      panels.template prefetch_residual<Tile::kColumns>(p, row, column);
      // Rows outside multiply zeros: any scale will do.
      const float* scales[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        scales[half] =
            p.a_scales + min(row + 16 * (warp % 4) + lane / 4 + 8 * half, p.m - 1) * p.a_scale_stride;
      const float* column_scales = p.b_scales + column / 128 * p.b_scale_stride;
      float total[Tile::kSums];
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i) total[i] = 0.0f;
      float next[3] = {scales[0][0], scales[1][0], column_scales[0]};
      for (int block = 0; block < p.k_blocks; ++block, at.advance()) {
        float sum[Tile::kSums];
        at.wait();
        multiply_stage<ptx::WgmmaE4m3>(at, sum, true);
        const float low = next[0] * next[2], high = next[1] * next[2];
        if (block + 1 < p.k_blocks) {
          next[0] = scales[0][block + 1], next[1] = scales[1][block + 1], next[2] = column_scales[block + 1];
        }
        ptx::wgmma_wait<0>();
        ptx::fence_registers(sum);
        if (leader) at.release(at.stage);
#pragma unroll
        for (int i = 0; i < Tile::kSums; ++i) total[i] = fmaf(sum[i], i % 4 < 2 ? low : high, total[i]);
      }
      panels.store(p, total, row, column);
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
  if (op.tile == 1 || (op.tile == 0 && op.m > 128)) {
    using Tile = DenseTile<ptx::WgmmaE4m3, 128, 128, 2, false, false>;
    return launch_dense_tile<Tile>("gemm_dense_fp8_kernel", gemm_dense_fp8_kernel<Tile>, op, at);
  }
  using Tile = DenseTile<ptx::WgmmaE4m3, 128, 128, 1, false, false>;
  launch_dense_tile<Tile>("gemm_dense_fp8_kernel", gemm_dense_fp8_kernel<Tile>, op, at);
}

}  // namespace millrace::cuda
