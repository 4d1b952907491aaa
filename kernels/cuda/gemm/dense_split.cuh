// Products of few rows with K in parts: a cluster's CTAs have one tile, each a part of K, and exchange their
// sums through shared memory, where they are added in the order of the parts. With few rows there are fewer
// tiles than SMs, and whatever the tile, an SM takes some 45 bytes a cycle from L2: parts give every SM its
// share of tiles that are large enough to need few bytes.
//
// A tile's 64 x 64 blocks of outputs are dealt out: block u is finished by CTA u % parts, whose rings have
// been read when the sums come. An option, off by default: who is added to whom depends on the tile, and so
// on the number of rows.
//
// Roofline: the weights' bytes at 4.3 TB/s, or those of both operands at 45 bytes a cycle of an SM; then 128
// KB of sums at most to each CTA, some 2,000 cycles.
#pragma once

#include "kernels/cuda/gemm/dense_wgmma.cuh"

namespace millrace::cuda {

template <class Tile>
struct DenseParts {
  static constexpr int kGroups = Tile::kWarpgroupColumns / 64;  // of a warpgroup
  static constexpr int kBlocks = Tile::kConsumers * kGroups;    // of a tile
  static constexpr int kBlockBytes = 64 * 64 * 4;
  static_assert(Tile::kCtas == 1 && Tile::kTall == 1 && Tile::kWarpgroupColumns % 64 == 0);
  // Blocks of a CTA, times parts, have room where the ring was.
  static constexpr bool fits(int parts) {
    return (kBlocks + parts - 1) / parts * parts * kBlockBytes <= Tile::kStages * Tile::kStageBytes;
  }
};

#ifdef MILLRACE_HAS_WGMMA

// A consumer's sums of stages [begin, end) of K.
template <class Element, class Tile>
__device__ __forceinline__ void multiply_part(DenseCursor<Tile>& at, int begin, int end, bool leader,
                                              typename Element::Sum (&sum)[1][Tile::kSums]) {
#pragma unroll
  for (int i = 0; i < Tile::kSums; ++i) sum[0][i] = 0;  // of a part without stages
  uint32_t before = 0;
  for (int block = begin; block < end; ++block, before = at.stage, at.advance()) {
    at.wait();
    multiply_stage<Element>(at, sum, block == begin);
    if (block > begin) {
      ptx::wgmma_wait<1>();
      if (leader) at.release(before);
    }
  }
  ptx::wgmma_wait<0>();
  ptx::fence_registers(sum[0]);
}

// Sums to who finishes their blocks: those of part s of block u lie at [u / parts][s][4 sums of 32][thread].
template <class Tile, class Sum>
__device__ __forceinline__ void send_sums(const DenseShared<Tile>& shared, int warpgroup, int thread,
                                          int part, int parts, Sum (&sum)[Tile::kSums]) {
  using Parts = DenseParts<Tile>;
#pragma unroll 1
  for (int group = 0; group < Parts::kGroups; ++group) {
    const int u = warpgroup * Parts::kGroups + group;
    const uint32_t to = ptx::remote_address(
        static_cast<uint32_t>(u % parts),
        ptx::shared_address(shared.stages + ((u / parts) * parts + part) * Parts::kBlockBytes) + thread * 16);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      ptx::store_remote(to + i * 2048, sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
#pragma unroll
    for (int i = 0; i < Tile::kSums - 32; ++i) sum[i] = sum[i + 32];
  }
}

// This CTA's blocks, one warpgroup after the other: their parts added in order, and the epilogue.
template <class Tile>
__device__ __forceinline__ void finish_blocks(const DenseProblem& p, const DenseShared<Tile>& shared,
                                              DensePanels<Tile>& panels, tile::TileOrder::At tile,
                                              int warpgroup, int thread, int part, int parts) {
  using Parts = DenseParts<Tile>;
#pragma unroll 1
  for (int u = part, i = 0; u < Parts::kBlocks; u += parts, ++i) {
    if (i % Tile::kConsumers != warpgroup) continue;
    const int of = u / Parts::kGroups, group = u % Parts::kGroups;
    const int row = tile.m * Tile::kRows + (Tile::kSplitColumns ? 0 : of * 64),
              column = tile.n * Tile::kColumns + (Tile::kSplitColumns ? of * Tile::kWarpgroupColumns : 0) +
                       group * 64;
    if (p.residual_at >= 0) panels.load_block(p, row, column);
    const uint8_t* from = shared.stages + i * parts * Parts::kBlockBytes + thread * 16;
    float y[32];
    for (int s = 0; s < parts; ++s, from += Parts::kBlockBytes) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float4 four = *reinterpret_cast<const float4*>(from + k * 2048);
        if (s == 0) {
          y[4 * k] = four.x, y[4 * k + 1] = four.y, y[4 * k + 2] = four.z, y[4 * k + 3] = four.w;
        } else {
          y[4 * k] += four.x, y[4 * k + 1] += four.y, y[4 * k + 2] += four.z, y[4 * k + 3] += four.w;
        }
      }
    }
    panels.store_block(p, y, row, column);
  }
}

#endif  // MILLRACE_HAS_WGMMA

template <class Element, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_dense_split_kernel(const __grid_constant__ DenseProblem p, const int parts) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ uint8_t raw[];
  const DenseShared<Tile> shared(raw);
  const int warp = static_cast<int>(ptx::warp_uniform(threadIdx.x / 32)), lane = threadIdx.x % 32;
  const int warpgroup = warp / 4;
  const int part = static_cast<int>(blockIdx.x) % parts;
  const tile::TileOrder::At tile = p.order.at(static_cast<int32_t>(blockIdx.x) / parts);
  const int begin = static_cast<int>(int64_t{p.k_blocks} * part / parts),
            end = static_cast<int>(int64_t{p.k_blocks} * (part + 1) / parts);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();  // the barriers are there
  ptx::let_dependents_start();
  if (warpgroup == Tile::kConsumers) {
    if constexpr (Tile::kSharesRegisters) ptx::fewer_registers<Tile::kProducerRegisters>();
    if (warp == 4 * Tile::kConsumers && lane == 0) {
      ptx::wait_for_previous();
      typename Tile::Ring::Cursor at;
      for (int block = begin; block < end; ++block, ++at)
        load_stage(p, shared, at, tile.m * Tile::kRows, tile.n * Tile::kColumns, 0, block);
    }
    __syncwarp();         // lane 0 has loaded all
    ptx::cluster_sync();  // those of the consumers: all threads of a cluster arrive
    ptx::cluster_sync();
  } else {
    if constexpr (Tile::kSharesRegisters) ptx::more_registers<Tile::kConsumerRegisters>();
    ptx::wait_for_previous();
    DenseCursor<Tile> at(shared, warpgroup);
    DensePanels<Tile> panels(shared, warpgroup, warp % 4, lane);
    const bool leader = panels.leader();
    const int thread = 32 * (warp % 4) + lane;
    typename Element::Sum sum[1][Tile::kSums];
    multiply_part<Element>(at, begin, end, leader, sum);
    ptx::cluster_sync();  // all rings have been read
    send_sums(shared, warpgroup, thread, part, parts, sum[0]);
    ptx::cluster_sync();  // the others' sums are there
    finish_blocks(p, shared, panels, tile, warpgroup, thread, part, parts);
    if (leader) ptx::bulk_store_wait();  // shared memory stays until copies have read it
  }
#else
  __trap();
#endif
}

// False where the exchange has no room, or the epilogue goes by rows.
template <class Tile>
bool launch_dense_split_as(const DenseGemm& op, int parts, const Launch& at) {
  if (!DenseParts<Tile>::fits(parts)) return false;
  const DenseProblem p = dense_problem<Tile>(op, at);
  if (p.by_rows) return false;
  auto* kernel = gemm_dense_split_kernel<typename Tile::Of, Tile>;
  allow_shared_memory(kernel, Tile::kBytes);
  launch_clusters("gemm_dense_split_kernel", static_cast<unsigned>(parts), kernel,
                  dim3(static_cast<unsigned>(p.order.count() * parts)), Tile::kThreads, Tile::kBytes, at, p,
                  parts);
  return true;
}

// wide: 128 x 192, else 64 x 128, which TN, the gradient of weights, has not.
template <class Element>
bool launch_dense_split_layout(const DenseGemm& op, bool wide, int parts, const Launch& at) {
  if (op.mn_major_a)
    return wide && launch_dense_split_as<DenseTile<Element, 128, 192, 1, true, true>>(op, parts, at);
  const auto with_tile = [&]<bool kMnB>() {
    return wide ? launch_dense_split_as<DenseTile<Element, 128, 192, 1, false, kMnB>>(op, parts, at)
                : launch_dense_split_as<DenseTile<Element, 64, 128, 1, false, kMnB>>(op, parts, at);
  };
  return op.mn_major_b ? with_tile.template operator()<true>() : with_tile.template operator()<false>();
}

}  // namespace millrace::cuda
