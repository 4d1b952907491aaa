// Grouped GEMM of e4m3 rows and weights with a scale for every 1 x 128 elements of a row and 128 x 128 of an
// expert's weights: the mainloop of dense_fp8.cu, items and loads of grouped_tile.cuh.
//
// Roofline: 512 cycles of the tensor cores a stage of 128 x 128 x 128, in which 24 KB come from L2, 48 bytes
// a cycle; with few rows an expert the weights' bytes bind, at 128 rows 1,100 TFLOP/s.
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
  __syncthreads();
  ptx::cluster_arrive();
  ptx::cluster_wait();
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  if (warpgroup == Tile::kConsumers) {
    ptx::fewer_registers<40>();
    if (warp == 4 * Tile::kConsumers && lane == 0) produce_grouped<Tile, false>(p, shared);
  } else {
    ptx::more_registers<232>();
    DenseCursor<Tile> at(shared, warpgroup);
    DensePanels<Tile> panels(shared, warpgroup, warp % 4, lane);
    const bool leader = panels.leader();
    GroupedCursor<Tile, false> cursor(p);
    GroupedItem item;
    for (int index = static_cast<int>(blockIdx.x) / Tile::kCtas; cursor.find(index, item);
         index += static_cast<int>(gridDim.x) / Tile::kCtas) {
      // Rows and columns outside are not stored: any scale will do.
      const int row = item.a_row + warpgroup * 64 + 16 * (warp % 4) + lane / 4;
      const float* scales[2] = {p.dense.a_scales + int64_t{min(row, p.m - 1)} * p.dense.a_scale_stride,
                                p.dense.a_scales + int64_t{min(row + 8, p.m - 1)} * p.dense.a_scale_stride};
      const float* column_scales = p.dense.b_scales + item.expert * p.b_scales_per_expert +
                                   min(item.column, p.dense.n - 1) / 128 * p.dense.b_scale_stride;
      float total[Tile::kSums];
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i) total[i] = 0.0f;
      float next[3] = {scales[0][0], scales[1][0], column_scales[0]};
      for (int block = 0; block < p.dense.k_blocks; ++block) {
        float sum[Tile::kSums];
        at.wait();
        multiply_stage<ptx::WgmmaE4m3>(at, sum, true);
        const float low = next[0] * next[2], high = next[1] * next[2];
        if (block + 1 < p.dense.k_blocks) {
          next[0] = scales[0][block + 1], next[1] = scales[1][block + 1], next[2] = column_scales[block + 1];
        }
        ptx::wgmma_wait<0>();
        ptx::fence_registers(sum);
        if (leader) at.release(at.stage);
        at.advance();
#pragma unroll
        for (int i = 0; i < Tile::kSums; ++i) total[i] = fmaf(sum[i], i % 4 < 2 ? low : high, total[i]);
      }
      store_grouped(p, panels, item, total);
    }
    if (leader) ptx::bulk_store_wait();
  }
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();
#else
  __trap();
#endif
}

}  // namespace

void launch_grouped_fp8(const GroupedDense& op, const Launch& at) {
  using Tile = DenseTile<ptx::WgmmaE4m3, 128, 128, 2, false, false>;
  launch_grouped_tile<Tile>("gemm_grouped_fp8_kernel", gemm_grouped_fp8_kernel<Tile>, op, at);
}

}  // namespace millrace::cuda
