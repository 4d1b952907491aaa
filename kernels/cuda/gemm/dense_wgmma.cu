// GEMM of plain bf16, f16 and int8 matrices on Hopper: tiles of 128 x 256 outputs by clusters of two CTAs
// that share the columns' operand (each loads half of it to both), persistent, two consumer warpgroups of 64
// rows each.
//
// Roofline of a stage (64 of K in 16 bits): 4 wgmma of 64 x 256 x 16 for each of two warpgroups are 1,024
// cycles of the tensor cores; 32 KB come from L2 to each CTA in that time, 32 bytes a cycle. The products set
// the pace as long as three stages are under way. What is left is the epilogue, 64 KB of outputs a tile,
// while the producer fills the next tile's stages.
#include "kernels/cuda/gemm/dense_tile.cuh"

namespace millrace::cuda {
namespace {

template <class Element, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_dense_wgmma_kernel(const __grid_constant__ DenseProblem p) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ uint8_t raw[];
  const DenseShared<Tile> shared(raw);
  const int warp = static_cast<int>(ptx::warp_uniform(threadIdx.x / 32)), lane = threadIdx.x % 32;
  const int warpgroup = warp / 4;
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  if constexpr (Tile::kCtas > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
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
    const int rank = static_cast<int>(blockIdx.x % Tile::kCtas), tiles = p.m_tiles * p.n_tiles;
    for (int index = static_cast<int>(blockIdx.x) / Tile::kCtas; index < tiles;
         index += static_cast<int>(gridDim.x) / Tile::kCtas) {
      const DenseTileAt tile = tile_at<Tile>(p, index);
      const int row =
          (tile.m_tile * Tile::kCtas + rank) * Tile::kRows + (Tile::kSplitColumns ? 0 : warpgroup * 64);
      const int column =
          tile.n_tile * Tile::kColumns + (Tile::kSplitColumns ? warpgroup * Tile::kWarpgroupColumns : 0);
      panels.template prefetch_residual<Tile::kWarpgroupColumns>(p, row, column);
      typename Element::Sum sum[Tile::kSums];
      uint32_t before = 0;
      for (int block = 0; block < p.k_blocks; ++block) {
        at.wait();
        multiply_stage<Element>(at, sum, block == 0);
        if (block > 0) {
          ptx::wgmma_wait<1>();
          if (leader) at.release(before);
        }
        before = at.stage;
        at.advance();
      }
      ptx::wgmma_wait<0>();
      ptx::fence_registers(sum);
      if (leader) at.release(before);
      panels.store(p, sum, row, column);
    }
    if (leader) ptx::bulk_store_wait();  // shared memory stays until copies have read it
  }
  if constexpr (Tile::kCtas > 1) {  // nobody ends while the other CTA may still write to its shared memory
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
#else
  __trap();
#endif
}

template <class Element, int kM, int kN, int kCluster, bool kMnA, bool kMnB>
void launch_as(const DenseGemm& op, const Launch& at) {
  using Tile = DenseTile<Element, kM, kN, kCluster, kMnA, kMnB>;
  launch_dense_tile<Tile>("gemm_dense_wgmma_kernel", gemm_dense_wgmma_kernel<Element, Tile>, op, at);
}

template <class Element, bool kMnA, bool kMnB>
void launch_shape(const DenseGemm& op, int tile, const Launch& at) {
  if (tile == 1) return launch_as<Element, 128, 256, 2, kMnA, kMnB>(op, at);
  if (tile == 2) return launch_as<Element, 128, 128, 1, kMnA, kMnB>(op, at);
  launch_as<Element, 64, 128, 1, kMnA, kMnB>(op, at);
}

template <class Element>
void launch_layout(const DenseGemm& op, int tile, const Launch& at) {
  if (op.mn_major_a) return launch_shape<Element, true, true>(op, tile, at);
  if (op.mn_major_b) return launch_shape<Element, false, true>(op, tile, at);
  launch_shape<Element, false, false>(op, tile, at);
}

// The tile whose waves take least: cycles of a wave in units of 64 of K, and its epilogue.
int choose_tile(const DenseGemm& op, const Device& device) {
  const auto cost = [&](int64_t rows, int64_t columns, int64_t ctas, int64_t cycles) {
    const int64_t m = (op.m + rows * ctas - 1) / (rows * ctas), n = (op.n + columns - 1) / columns;
    const int64_t slots = device.sm_count() / ctas;
    return (m * n + slots - 1) / slots * (cycles * ((op.k + 63) / 64 + 12));
  };
  const int64_t costs[3] = {cost(128, 256, 2, 1060), cost(128, 128, 1, 720), cost(64, 128, 1, 415)};
  int best = 0;
  for (int i = 1; i < 3; ++i) best = costs[i] < costs[best] ? i : best;
  return best + 1;
}

}  // namespace

void launch_dense_wgmma(const DenseGemm& op, const Launch& at) {
  const int tile = op.tile > 0 ? op.tile : choose_tile(op, at.device);
  switch (op.type) {
    case DenseType::kBf16:
      return launch_layout<ptx::WgmmaBf16>(op, tile, at);
    case DenseType::kF16:
      return launch_layout<ptx::WgmmaF16>(op, tile, at);
    default:
      return launch_shape<ptx::WgmmaS8, false, false>(op, tile, at);
  }
}

}  // namespace millrace::cuda
