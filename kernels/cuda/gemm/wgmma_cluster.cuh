// GEMM of bf16 operands on Hopper's warpgroup instructions, by clusters of two CTAs: for bf16 weights, and
// for 8-bit ones that are kept dequantized (quant/packed_tiles.h). A work item is two times 128 tokens, or 64
// where there are few, a CTA each, and as many outputs as let all clusters have the same number of items:
// 2,880 outputs of 512 tokens are 33 x 2 items of 88 outputs for 66 clusters, where tiles of 128 x 128 keep
// 92 of 132 SMs at work.
//
// Tokens are the rows (M) of the products and weights their columns (N), of which an instruction takes any
// multiple of eight. Each CTA loads its own tokens, and half of the weights to both. More than 192 outputs do
// not fit: K is cut into segments, each one chain of products that is added to the totals at its end
// (tile/weight_format.cuh), so a thread has 96 accumulators and 96 totals.
//
// Roofline, in cycles for 64 columns of a CTA: the tensor cores, and 40 bytes a cycle from L2 (what tiles of
// 128 x 128 of CTAs that share nothing got); beside them what was measured, by the clock of the SM, with one
// item a CTA and outputs stored from registers. (By 128 bytes a cycle of shared memory, each warpgroup
// reading both of its operands, 48, 88 and 160 outputs would be 400, 520 and 736: that count is too high.)
//                  tensor cores    L2              measured
//   48 outputs     192             19 KB: 475      292
//   88 outputs     352             21.5 KB: 550    392
//   160 outputs    640             26 KB: 650      661
//
// Nobody waits for outputs: an item's totals leave under the first products of the next (StagedEpilogue). The
// second consumer warpgroup begins a stage later than the first, so that one multiplies while the other adds.
//
// Schedule: items have all the same length, and are not always a multiple of the clusters. Where it saves
// more than it costs, an item is split along K between two segments: one cluster begins with the first of
// them and stores its totals, another ends with the others, beginning with those totals: the same sums in the
// same order. With at least an item a cluster nobody waits: what is passed on was computed first and is
// needed last.
//
// GemmTile::kClusterNoSplitK: one chain over all of K. Its bits differ from every other kernel's: it says
// what equal bits cost, and nothing in the engine uses it.
#pragma once

#include "kernels/cuda/gemm/cluster_epilogue.cuh"
#include "kernels/cuda/gemm/wgmma_launch.cuh"
#include "millrace/kernels/tile/ptx/cluster.cuh"

namespace millrace::cuda {

inline constexpr uint16_t kBothCtas = 3;

template <int kTiles, int kTokens>
struct ClusterProblem : ClusterGemm {
  using Layout = ClusterStageLayout<kTiles, kTokens>;
  using Epilogue = StagedEpilogue<ClusterProblem>;
  CUtensorMap rows_map, out_maps[kMaxParts][2];
  ClusterGrid grid;
  bool by_boxes[kMaxParts];  // whether a part's outputs are stored by boxes

  __device__ ClusterItem item(int i) const {
    return grid.item(i, static_cast<int>(blockIdx.x % kClusterCtas));
  }
};

#ifdef MILLRACE_HAS_WGMMA

// A stage is empty when all consumer warps of both CTAs have read theirs, and only then may either be
// written.
template <class Layout>
using ClusterRing = StageRing<Layout, kClusterCtas * kConsumerWarps>;

// A producer, one thread of four: its operand of all pieces, for every other stage.
template <Operand kOperand, int kTiles, int kTokens>
__device__ void produce_pieces(const ClusterProblem<kTiles, kTokens>& p,
                               const ClusterRing<ClusterStageLayout<kTiles, kTokens>>& ring, bool turn) {
  using Layout = ClusterStageLayout<kTiles, kTokens>;
  const int mine = static_cast<int>(blockIdx.x % kClusterCtas) * (kTiles - Layout::kLoadedTiles);
  uint32_t stage = 0, parity = 1;
  ClusterPiece piece;
  for (int k = 0; p.piece(k, piece); ++k) {
    const ClusterItem item = p.item(piece.item);
    const int last = p.k_steps_until(piece.end);
    for (int k_step = p.k_steps_until(piece.begin); k_step < last; ++k_step) {
      if (turn) {
        ptx::barrier_wait(ring.empty + stage, parity);
        uint64_t* full = ring.full + stage;
        uint8_t* to = ring.stages + stage * Layout::kStageBytes;
        if constexpr (kOperand == Operand::kWeights) {
          ptx::barrier_arrive_expect(full, kClusterCtas * Layout::kLoadedTiles * Layout::kKStepBytes);
          ptx::tma_load_2d_multicast(kBothCtas, to + mine * Layout::kKStepBytes, p.maps + item.part,
                                     k_step * Layout::kKStepBytes, item.first_tile + mine, full);
        } else {
          ptx::barrier_arrive_expect(full, Layout::kStageBytes - Layout::kTokensAt);
          ptx::tma_load_3d(to + Layout::kTokensAt, &p.rows_map, k_step * (kWgmmaTileBytes / 1024),
                           item.first_token / kWgmmaRows, full);
        }
      }
      turn = !turn;
      if (++stage == Layout::kCount) stage = 0, parity ^= 1u;
    }
  }
}

// A consumer warp: its 16 tokens of all pieces of the cluster.
template <class Problem>
struct ClusterConsumer {
  using Layout = typename Problem::Layout;
  const Problem& p;
  const int warp, lane;
  StageCursor<Layout> at;
  const uint32_t peer_empty;           // the other CTA's barriers
  int left = 0;                        // K steps of all pieces
  ClusterPiece previous = {-1, 0, 0};  // whose totals have yet to be stored
  typename Problem::Epilogue epilogue;
  float total[Layout::kAccumulators];

  __device__ ClusterConsumer(const Problem& problem, const ClusterRing<Layout>& ring, int warp_index,
                             int lane_index)
      : p(problem),
        warp(warp_index),
        lane(lane_index),
        at(ring.stages, ring.full),
        peer_empty(ptx::remote_address(blockIdx.x % kClusterCtas ^ 1u, ptx::shared_address(ring.empty))),
        epilogue(problem, ring.stages + Layout::kRingBytes, warp_index, lane_index) {}

  // The warp has read the stage before; both CTAs must know, where they write to it again: so nothing is on
  // its way to a CTA that has ended. `left`: stages after it.
  __device__ void release_previous() const {
    const auto read = at.previous();
    const int who = left < Layout::kCount ? -1 : lane;
    read.release(who);
    if (who == 1) ptx::barrier_arrive_remote(peer_empty + 8 * read.stage);
  }
  // Half of the stage's products, left under way.
  template <int kHalf>
  __device__ void multiply(float (&acc)[Layout::kAccumulators], bool first) const {
    const uint64_t b = at.operand(Layout::second_operand(warp / ptx::kWarpgroupWarps));
    const uint64_t a = at.operand(Layout::first_operand(warp / ptx::kWarpgroupWarps));
    if (kHalf == 0) ptx::wgmma_fence();
#pragma unroll
    for (int i = 2 * kHalf; i < 2 * kHalf + 2; ++i)
      ptx::wgmma_bf16(acc, a + 2 * i, b + 2 * i, !first || i > 0);
    ptx::wgmma_commit();
  }
  // Under its first two products the stage before is released, under the others the next is waited for.
  template <bool kFirst>
  __device__ __forceinline__ void stage(float (&acc)[Layout::kAccumulators]) {
    multiply<0>(acc, kFirst);
    if (!kFirst) {
      ptx::wgmma_wait<1>();
      release_previous();
    }
    multiply<1>(acc, false);
    at.advance();
    if (--left > 0) at.wait();
  }
  __device__ ClusterItem item_of(const ClusterPiece& piece) const {
    return Layout::of_warp(p.item(piece.item), warp);
  }
  // Half of the totals of the piece before.
  template <int kHalf, bool kEnd = false>
  __device__ __forceinline__ void store() {
    if (previous.item < 0) return;
    if (previous.end != p.schedule.segments) {
      p.template store_partial<kHalf>(warp, lane, total);
    } else if (kEnd) {
      epilogue.template store_directly<kHalf>(item_of(previous), total);
    } else {
      epilogue.template store<kHalf>(item_of(previous), total);
    }
  }
  // What is added to half of a piece's totals is prefetched.
  template <int kHalf>
  __device__ __forceinline__ void prefetch(const ClusterPiece& piece) {
    if (piece.item >= 0 && piece.end == p.schedule.segments)
      epilogue.template prefetch<kHalf>(item_of(piece));
  }
  // The end of a segment: its products are done.
  __device__ __forceinline__ void end_segment(float (&acc)[Layout::kAccumulators]) const {
    ptx::wgmma_wait<0>();
    ptx::fence_registers(acc);
    release_previous();
  }
  // A segment of `count` K steps that is not the first of its piece.
  __device__ __forceinline__ void segment(int count) {
    float acc[Layout::kAccumulators];
    stage<true>(acc);
    for (int j = 1; j < count; ++j) stage<false>(acc);
    end_segment(acc);
#pragma unroll
    for (int i = 0; i < Layout::kAccumulators; ++i) total[i] += acc[i];
  }
  // The first of a piece; under its first products the totals of the piece before leave.
  __device__ __forceinline__ void first_segment(int count, bool continues) {
    float acc[Layout::kAccumulators];
    stage<true>(acc);
    if (previous.item < 0 && warp < ptx::kWarpgroupWarps) ptx::named_arrive<1, kConsumerWarps * kWarpLanes>();
    store<0>();
    if (count > 1) stage<false>(acc);
    prefetch<1>(previous);
    if (count > 2) stage<false>(acc);
    store<1>();
    if (continues) p.load_partial(warp, lane, total);
    for (int j = 3; j < count; ++j) stage<false>(acc);
    end_segment(acc);
    if (continues) {
#pragma unroll
      for (int i = 0; i < Layout::kAccumulators; ++i) total[i] += acc[i];
    } else {
#pragma unroll
      for (int i = 0; i < Layout::kAccumulators; ++i) total[i] = 0.0f + acc[i];
    }
  }

  // The mainloop.
  __device__ void run() {
    ClusterPiece piece, next;
    for (int k = 0; p.piece(k, piece); ++k) left += p.k_steps_until(piece.end) - p.k_steps_until(piece.begin);
    // The second warpgroup waits for the first, which arrives after its first stage.
    if (warp >= ptx::kWarpgroupWarps) ptx::named_barrier<1, kConsumerWarps * kWarpLanes>();
    at.wait();
    for (int k = 0; p.piece(k, piece); ++k) {
      const int last = p.k_steps_until(piece.end);
      int k_step = p.k_steps_until(piece.begin);
      first_segment(min(p.segment_k_steps, last - k_step), piece.begin > 0);
      k_step += p.segment_k_steps;
      const bool stores_later = p.piece(k + 1, next);
      if (stores_later && k_step >= last) prefetch<0>(piece);
      for (; k_step < last; k_step += p.segment_k_steps) {
        if (stores_later && k_step + p.segment_k_steps >= last) prefetch<0>(piece);
        segment(min(p.segment_k_steps, last - k_step));
      }
      previous = piece;
    }
    store<0, true>();
    store<1, true>();
    epilogue.end();
  }
};

#endif  // MILLRACE_HAS_WGMMA

template <class Problem>
__global__ void __launch_bounds__(kGemmThreads, 1)
    gemm_wgmma_cluster_kernel(const __grid_constant__ Problem p) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  const ClusterRing<typename Problem::Layout> ring(shared);
  const int warp = static_cast<int>(ptx::warp_uniform(threadIdx.x / kWarpLanes)),
            lane = threadIdx.x % kWarpLanes;
  if (threadIdx.x == 0) {
    ring.init();
    Problem::Epilogue::init(shared + Problem::Layout::kRingBytes);
    ptx::barrier_init_fence();
  }
  ptx::let_dependents_start();
  __syncwarp();
  ptx::cluster_arrive();
  if (warp < kConsumerWarps) {
    ptx::more_registers<kConsumerRegisters>();
    ptx::cluster_wait();  // both CTAs' barriers are there
    ptx::wait_for_previous();
    ClusterConsumer<Problem>(p, ring, warp, lane).run();
  } else {
    ptx::fewer_registers<kProducerRegisters>();
    ptx::cluster_wait();
    const int producer = warp - kConsumerWarps;
    if (lane == 0 && producer % 2 == 0) {
      produce_pieces<Operand::kWeights>(p, ring, producer == 0);  // which no kernel of a step writes
    } else if (lane == 0) {
      ptx::prefetch_map(&p.rows_map);
      ptx::wait_for_previous();
      produce_pieces<Operand::kTokens>(p, ring, producer == 1);
    }
  }
  // A CTA may end: what comes from the other one, copies and that stages were read, it has waited for.
#else
  __trap();
#endif
}

template <int kTiles, int kTokens>
void launch_cluster_as(const WgmmaGemm& gemm, bool no_split_k, float unscale, const SplitWorkspace& split,
                       const Launch& at) {
  using Problem = ClusterProblem<kTiles, kTokens>;
  using Layout = typename Problem::Layout;
  Problem p{};
  static_cast<WgmmaGemm&>(p) = gemm;
  p.unscale = unscale;
  p.split = split;
  p.segment_k_steps = no_split_k ? p.k_steps : k_steps_per_segment(p.k_steps);
  int32_t part_tiles[kMaxParts] = {};
  p.rows_map = rows_map_of(at.device, p.x, divide_up(p.rows, kWgmmaRows), p.k_steps, kTokens / kWgmmaRows);
  for (int i = 0; i < p.num_parts; ++i) {
    const WgmmaGemm::Part& part = p.parts[i];
    part_tiles[i] = part.num_tiles;
    p.maps[i] = map_of<PackedFormat::kBf16>(at.device, part.tiles, part.num_tiles, p.tile_bytes,
                                            Layout::kLoadedTiles);
    const auto ends = reinterpret_cast<uintptr_t>(part.out) | reinterpret_cast<uintptr_t>(part.bias);
    p.by_boxes[i] = part.rows % 4 == 0 && ends % 16 == 0;
    for (const int half : {0, 1}) {
      if (!p.by_boxes[i]) continue;
      const int outputs = (half == 1 ? Layout::kSecondHalfTiles : Layout::kFirstHalfTiles) * kTileRows;
      p.out_maps[i][half] = ptx::byte_rows_map(at.device, part.out, static_cast<uint64_t>(p.rows),
                                               static_cast<uint64_t>(part.rows) * sizeof(float),
                                               Problem::Epilogue::kTokens, outputs * sizeof(float));
    }
  }
  p.grid = ClusterGrid(part_tiles, p.num_parts, p.rows, {kTiles, kTokens});
  p.schedule.items = p.grid.items();
  p.schedule.segments = static_cast<int32_t>(divide_up(p.k_steps, p.segment_k_steps));
  int clusters = at.device.sm_count() / kClusterCtas;
  if (clusters > kMaxClusters) clusters = kMaxClusters;
  p.schedule.clusters = p.schedule.items < clusters ? p.schedule.items : clusters;
  const ScheduleCost cost(p.schedule.items, clusters, ClusterChoice::item_time({kTiles, kTokens}), p.k_steps,
                          split.totals != nullptr);
  p.schedule.assign(cost.split || (split.totals != nullptr && split.force));
  constexpr size_t kShared = Layout::kBytes;
  const auto kernel = gemm_wgmma_cluster_kernel<Problem>;
  allow_shared_memory(kernel, kShared);
  launch_clusters("gemm_wgmma_cluster_kernel", kClusterCtas, kernel,
                  dim3(static_cast<unsigned>(p.schedule.clusters * kClusterCtas)), kGemmThreads, kShared, at,
                  p);
}

}  // namespace millrace::cuda
