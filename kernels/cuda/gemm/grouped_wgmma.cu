// Grouped GEMM of bf16 and f16 on Hopper: forward (NT), gradient of the rows (NN) and of the weights (TN).
// Tiles of 128 x 256 outputs by clusters of two CTAs that share the rows (grouped_tile.cuh); the mainloop of
// dense_wgmma.cu. An expert's rows end inside a tile: what is loaded behind them belongs to the next expert,
// and is not stored; where rows are what is summed, the last stage's are set to zero in shared memory.
//
// Roofline: 1,024 cycles of the tensor cores a stage, in which 40 KB come from L2, 40 bytes a cycle. With r
// rows an expert the weights' bytes bind below r = 989 TFLOP/s / 4.3 TB/s = 230: at 128 rows 550 TFLOP/s.
#include "kernels/cuda/gemm/grouped_tile.cuh"

namespace millrace::cuda {
namespace {

#ifdef MILLRACE_HAS_WGMMA
// Rows of K from `rows` on, of 64, of this warpgroup's half of both operands: zero.
template <class Tile>
__device__ void clear_rows(const DenseCursor<Tile>& at, int rows, int thread) {
  uint8_t* stage = at.shared.stages + at.stage * Tile::kStageBytes;
  constexpr int kChunks = Tile::kStageBytes / (64 * 128) / Tile::kConsumers;  // of 64 outputs
  for (int i = 0; i < kChunks; ++i) {
    uint8_t* chunk = stage + (i * Tile::kConsumers + at.warpgroup) * 64 * 128;
    for (int byte = rows * 128 + thread * 16; byte < 64 * 128; byte += 128 * 16)
      *reinterpret_cast<uint4*>(chunk + byte) = make_uint4(0, 0, 0, 0);
  }
  ptx::publish_to_async();
  ptx::named_barrier<Tile::kConsumers * 128>(7);  // both warpgroups' halves are there
}
#endif

template <class Element, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_grouped_wgmma_kernel(const __grid_constant__ GroupedProblem p) {
#ifdef MILLRACE_HAS_WGMMA
  constexpr bool kWgrad = Tile::kTransposedA;
  extern __shared__ uint8_t raw[];
  const DenseShared<Tile> shared(raw);
  const int warp = static_cast<int>(ptx::warp_uniform(threadIdx.x / 32)), lane = threadIdx.x % 32;
  const int warpgroup = warp / 4;
  if (threadIdx.x == 0) shared.init();
  tile::sync_cluster<Tile::kCtas>();
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  if (warpgroup == Tile::kConsumers) {
    ptx::fewer_registers<40>();
    if (warp == 4 * Tile::kConsumers && lane == 0) produce_grouped<Tile, kWgrad>(p, shared);
  } else {
    ptx::more_registers<232>();
    DenseCursor<Tile> at(shared, warpgroup);
    DensePanels<Tile> panels(shared, warpgroup, warp % 4, lane);
    const bool leader = panels.leader();
    GroupedCursor<Tile, kWgrad> cursor(p);
    GroupedItem item;
    for (int index = static_cast<int>(blockIdx.x) / Tile::kCtas; cursor.find(index, item);
         index += static_cast<int>(gridDim.x) / Tile::kCtas) {
      float sum[1][Tile::kSums];
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i) sum[0][i] = 0.0f;
      uint32_t before = 0;
      for (int k = 0; k < item.k_count; k += Tile::kStageK) {
        at.wait();
        if (kWgrad && item.k_count - k < Tile::kStageK)
          clear_rows<Tile>(at, item.k_count - k, 32 * (warp % 4) + lane);
        multiply_stage<Element>(at, sum, k == 0);
        if (k > 0) {
          ptx::wgmma_wait<1>();
          if (leader) at.release(before);
        }
        before = at.stage;
        at.advance();
      }
      ptx::wgmma_wait<0>();
      ptx::fence_registers(sum[0]);
      if (leader && item.k_count > 0) at.release(before);
      store_grouped(p, panels, item, warpgroup * 64, sum[0]);
    }
    if (leader) ptx::bulk_store_wait();  // shared memory stays until copies have read it
  }
  tile::leave_cluster<Tile::kCtas>();
#else
  __trap();
#endif
}

template <class Element, bool kMnA, bool kMnB>
void launch_as(const GroupedDense& op, const Launch& at) {
  using Tile = DenseTile<Element, 128, 256, 2, kMnA, kMnB>;
  launch_grouped_tile<Tile>("gemm_grouped_wgmma_kernel", gemm_grouped_wgmma_kernel<Element, Tile>, op, at);
}
template <class Element>
void launch_op(const GroupedDense& op, const Launch& at) {
  if (op.op == GroupedOp::kForward) return launch_as<Element, false, false>(op, at);
  if (op.op == GroupedOp::kDgrad) return launch_as<Element, false, true>(op, at);
  launch_as<Element, true, true>(op, at);
}

}  // namespace

void launch_grouped_wgmma(const GroupedDense& op, const Launch& at) {
  op.type == DenseType::kF16 ? launch_op<ptx::WgmmaF16>(op, at) : launch_op<ptx::WgmmaBf16>(op, at);
}

}  // namespace millrace::cuda
