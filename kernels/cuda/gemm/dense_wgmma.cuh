// GEMM of plain bf16, f16 and int8 matrices on Hopper: tiles of 128 x 256 outputs by clusters of two CTAs
// that share the columns' operand (each loads half of it to both), persistent, two consumer warpgroups of 64
// rows each.
//
// Roofline of a stage (64 of K in 16 bits): 4 wgmma of 64 x 256 x 16 for each of two warpgroups are 1,024
// cycles of the tensor cores; 32 KB come from L2 to each CTA in that time, 32 bytes a cycle. The products set
// the pace as long as three stages are under way. What is left is the epilogue, 64 KB of outputs a tile,
// while the producer fills the next tile's stages. (At a tile's end the second warpgroup waiting for the
// first, so that one's epilogue runs under the other's products, was slower: 608 for 638 TFLOP/s with GELU at
// 8,192^3.)
#pragma once

#include "kernels/cuda/gemm/dense_launch.cuh"

namespace millrace::cuda {

// kPlain: sums are only rounded. With the code of all epilogues beside it small tiles were up to two fifths
// slower.
template <class Element, class Tile, bool kPlain>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_dense_wgmma_kernel(const __grid_constant__ DenseProblem p) {
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
    if constexpr (Tile::kSharesRegisters) ptx::fewer_registers<Tile::kProducerRegisters>();
    if (warp == 4 * Tile::kConsumers && lane == 0) produce(p, shared);
  } else {
    if constexpr (Tile::kSharesRegisters) ptx::more_registers<Tile::kConsumerRegisters>();
    DenseCursor<Tile> at(shared, warpgroup);
    DensePanels<Tile> panels(shared, warpgroup, warp % 4, lane);
    const bool leader = panels.leader();
    const int rank = static_cast<int>(blockIdx.x % Tile::kCtas);
    tile::each_tile<Tile::kCtas>(p.order, [&](tile::TileOrder::At tile) {
      const int row = (tile.m * Tile::kCtas + rank) * Tile::kRows +
                      (Tile::kSplitColumns ? 0 : warpgroup * Tile::kTall * 64);
      const int column =
          tile.n * Tile::kColumns + (Tile::kSplitColumns ? warpgroup * Tile::kWarpgroupColumns : 0);
      if constexpr (!kPlain) {
#pragma unroll
        for (int i = 0; i < Tile::kTall; ++i)
          panels.template prefetch_residual<Tile::kWarpgroupColumns>(p, row + 64 * i, column);
        panels.warm_columns(p, column);
      }
      typename Element::Sum sum[Tile::kTall][Tile::kSums];
      uint32_t before = 0;
      for (int block = 0; block < p.k_blocks; ++block, before = at.stage, at.advance()) {
        at.wait();
        multiply_stage<Element>(at, sum, block == 0);
        if constexpr (!kPlain) {
          if (block == p.residual_at) panels.load_residual(p, row, column);
        }
        if (block > 0) {
          ptx::wgmma_wait<1>();
          if (leader) at.release(before);
        }
      }
      typename DensePanels<Tile>::Ahead ahead{};
      if constexpr (!kPlain) ahead = panels.read_ahead(p, row, column);
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < Tile::kTall; ++i) ptx::fence_registers(sum[i]);
      if (leader) at.release(before);
      if constexpr (kPlain) {
#pragma unroll
        for (int i = 0; i < Tile::kTall; ++i) panels.store_rounded(p, sum[i], row + 64 * i, column);
      } else {
        panels.store(p, sum[0], row, column, ahead);
#pragma unroll
        for (int i = 1; i < Tile::kTall; ++i) {
          if (p.residual_at >= 0) panels.load_residual(p, row + 64 * i, column);
          panels.store(p, sum[i], row + 64 * i, column);
        }
      }
    });
    if (leader) ptx::bulk_store_wait();  // shared memory stays until copies have read it
  }
  tile::leave_cluster<Tile::kCtas>();
#else
  __trap();
#endif
}

template <class Tile>
void launch_dense_as(const DenseGemm& op, const Launch& at) {
  launch_dense_tile<Tile>("gemm_dense_wgmma_kernel",
                          op.epilogue.plain() ? gemm_dense_wgmma_kernel<typename Tile::Of, Tile, true>
                                              : gemm_dense_wgmma_kernel<typename Tile::Of, Tile, false>,
                          op, at);
}

// Which tiles a layout has: every kernel takes seconds to compile.
template <class Element, bool kMnA, bool kMnB>
void launch_dense_shape(const DenseGemm& op, int tile, const Launch& at) {
  if (tile == 1) return launch_dense_as<DenseTile<Element, 128, 256, 2, kMnA, kMnB>>(op, at);
  if (tile == 2) return launch_dense_as<DenseTile<Element, 128, 128, 1, kMnA, kMnB>>(op, at);
  if constexpr (Element::kElementBytes == 2) {
    if (tile == 5) return launch_dense_as<DenseTile<Element, 128, 192, 1, kMnA, kMnB>>(op, at);
    if constexpr (!kMnA) {
      if (tile == 6) return launch_dense_as<DenseTile<Element, 64, 64, 1, kMnA, kMnB>>(op, at);
    }
    if constexpr (!kMnB) {
      if (tile == 4) return launch_dense_as<DenseTile<Element, 192, 128, 1, kMnA, kMnB>>(op, at);
      if (tile == 7) return launch_dense_as<DenseTile<Element, 64, 96, 2, kMnA, kMnB>>(op, at);
      if (tile == 8) return launch_dense_as<DenseTile<Element, 128, 320, 2, kMnA, kMnB, 2>>(op, at);
    }
  }
  launch_dense_as<DenseTile<Element, 64, 128, 1, kMnA, kMnB>>(op, at);
}

template <class Element>
void launch_dense_layout(const DenseGemm& op, int tile, const Launch& at) {
  if constexpr (Element::kElementBytes == 2) {
    if (op.mn_major_a) return launch_dense_shape<Element, true, true>(op, tile, at);
    if (op.mn_major_b) return launch_dense_shape<Element, false, true>(op, tile, at);
  }
  launch_dense_shape<Element, false, false>(op, tile, at);
}

}  // namespace millrace::cuda
