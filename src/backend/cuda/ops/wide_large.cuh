// Large items of wide linear products of bf16 operands on Hopper's warpgroup instructions: two CTAs, a
// cluster, have 256 outputs x 192 tokens, or 128 x 192, in shares that end at the same time. For bf16
// weights, and for 8-bit ones that are kept opened (packed.h).
//
// Limits, in cycles for 64 columns of a CTA: what L2 gives to all SMs (9.5 TB/s were seen, 40 bytes a cycle
// of an SM), shared memory (128 bytes a cycle), where operands are written once and read by each of the two
// warpgroups' instructions, and the tensor cores. Measured, by the clock of the SM: 860 for 128 x 192 with
// tokens shared, 545 to 575 for 128 x 96 (512 rows).
//                                  L2             shared memory        tensor cores
//   128 x 128, alone               32 KB: 800     80 KB: 640           512
//   128 x 192, tokens shared       28 KB: 700     104 KB: 812          768     (alone 40 KB: 1,000)
//   128 x 96, weights shared       20 KB: 500     68 KB: 531           384     (alone 28 KB: 700)
// Shared: each CTA brings half to both. More than 192 tokens do not fit: a segment of the columns is one
// chain of products and is added to the totals at its end (tile_format.cuh), so a thread holds 96 sums and 96
// totals.
//
// Nobody waits for outputs: an item's totals are stored under the first products of the next. The second
// warpgroup begins a stage later than the first, so that one multiplies while the other adds.
//
// Shares: items have all the same length, and are rarely a multiple of the clusters. An item may be cut
// between two segments: one cluster begins with the first of them and hands its totals over, another ends
// with the others, beginning with those totals: the same sums in the same order. With at least an item a
// cluster nobody waits: what is handed over was computed first and is needed last.
//
// kLoose: one chain over all columns. Its bits differ from every other kernel's: it says what equal bits
// cost, and nothing in the engine uses it.
#pragma once

#include "backend/cuda/ops/wide_product.cuh"
#include "backend/cuda/ops/wide_shares.h"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/ptx/grid_sync.cuh"
#include "backend/cuda/ptx/predicated.cuh"
#include "backend/cuda/ptx/wgmma_widths.cuh"

namespace millrace::cuda {

inline constexpr uint16_t kBothCtas = 3;
inline constexpr int kMostSums = 96;  // of a thread
inline constexpr int kMostShared = 232448;

template <int kCtaTokens>
struct LargeLayout {
  static constexpr int kTokens = kCtaTokens;
  static constexpr bool kSharesTokens = kTokens == kLargeTokens;  // else weights
  static constexpr int kPairBytes = TileFormat<PackedFormat::kBf16>::kPairBytes;
  static constexpr int kGroupBytes = kLargeTiles / 2 * kPairBytes;  // a warpgroup's weights of a stage
  static constexpr int kTokensAt = 2 * kGroupBytes;
  static constexpr int kStageBytes = kTokensAt + kTokens * ptx::kSwizzleRowBytes;
  static constexpr int kCount = kMostShared / (kStageBytes + 2 * 8);
  static constexpr int kBytes = kCount * (kStageBytes + 2 * 8);
  static constexpr int kSums = kTokens / 2;  // of a thread
  static_assert(kStageBytes % 1024 == 0 && kTokens % 32 == 0);
  // The operands of a warpgroup's products in a stage.
  __device__ static constexpr uint32_t first_operand(int group) {
    return static_cast<uint32_t>(group * kGroupBytes);
  }
  __device__ static constexpr uint32_t second_operand() { return kTokensAt; }
};

// What the CTAs of clusters multiply, in pieces.
struct LargeWork : WgmmaLinear {
  CUtensorMap maps[kLargeParts];  // of the parts
  int32_t segment_pairs;
  float unscale;
  WideSplit split;
  LargeShares shares;

  __device__ int pairs_until(int segment) const { return min(segment * segment_pairs, pairs); }
  __device__ bool piece(int k, LargePiece& piece) const {
    return shares.piece(static_cast<int>(blockIdx.x / kClusterCtas), k, piece);
  }

  // Totals that another CTA goes on with: those of CTA `from`, [quad][thread] of four.
  __device__ float4* handed(int from) const {
    constexpr int64_t kQuads = kMultiplyWarps * kWarpLanes * kMostSums / 4;
    return reinterpret_cast<float4*>(split.totals) + from * kQuads;
  }
  template <int kHalf, int kSums>
  __device__ void hand_over(int warp, int lane, const float (&total)[kSums]) const {
    constexpr int kQuads = kSums / 4;
    const int cta = static_cast<int>(blockIdx.x);
    float4* to = handed(cta) + warp * kWarpLanes + lane;
#pragma unroll
    for (int i = kHalf * (kQuads / 2); i < (kHalf == 0 ? kQuads / 2 : kQuads); ++i) {
      to[i * (kMultiplyWarps * kWarpLanes)] =
          make_float4(total[4 * i], total[4 * i + 1], total[4 * i + 2], total[4 * i + 3]);
    }
    if (kHalf == 0) return;
    __threadfence();
    __syncwarp();
    if (lane == 0) ptx::add_release(split.ready + cta * kMultiplyWarps + warp, 1);
  }
  // From the same CTA of the next cluster.
  template <int kSums>
  __device__ void take_over(int warp, int lane, float (&total)[kSums]) const {
    const int from = static_cast<int>(blockIdx.x) + kClusterCtas;
    uint32_t* ready = split.ready + from * kMultiplyWarps + warp;
    ptx::wait_count(ready, 1);
    const float4* totals = handed(from) + warp * kWarpLanes + lane;
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      const float4 four = __ldcg(totals + i * (kMultiplyWarps * kWarpLanes));
      total[4 * i] = four.x, total[4 * i + 1] = four.y, total[4 * i + 2] = four.z, total[4 * i + 3] = four.w;
    }
    __syncwarp();
    if (lane == 0) *ready = 0;  // for the next product
  }
};

template <int kTokens>
struct LargeProblem : LargeWork {
  using Layout = LargeLayout<kTokens>;
  static constexpr int kOld = kTokens == 192 ? 8 : 6;  // outputs that are added to at a time: registers
  LargeGrid<Layout::kSharesTokens> grid;

  __device__ LargeItem item(int i) const { return grid.item(i, static_cast<int>(blockIdx.x % kClusterCtas)); }
  __device__ void prefetch_maps() const {}  // tokens have none

  // Half of the warp's outputs, rows g and g + 8, tokens 8j + 2t and + 1 of an item.
  template <int kHalf>
  __device__ void store(const LargeItem& item, int warp, int lane,
                        const float (&total)[Layout::kSums]) const {
    constexpr int kCount = Layout::kSums / 4, kFirst = kHalf * kCount;  // of the tokens of a lane
    const Part& part = parts[item.part];
    const int first = item.first_token + 2 * (lane % 4);
    const int left = static_cast<int>(min(rows - first, int64_t{kTokens}));  // tokens from there on
    const auto token = [](int i) { return i / 2 * 8 + i % 2; };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = (item.first_tile + 2 * warp + half) * kTileRows + lane / 4;
      if (column >= part.rows) continue;
      const float bias = part.bias != nullptr ? part.bias[column] : 0.0f;
      float* to = part.out + int64_t{first} * part.rows + column;
#pragma unroll
      for (int begin = kFirst; begin < kFirst + kCount; begin += kOld) {
        float old[kOld];  // asked for before anything is stored; what changes nothing, where nothing is added
#pragma unroll
        for (int i = 0; i < kOld; ++i) old[i] = -0.0f;
        if (add) {
#pragma unroll
          for (int i = begin; i < begin + kOld; ++i)
            ptx::load_if(token(i) < left, to + int64_t{token(i)} * part.rows, old[i - begin]);
        }
#pragma unroll
        for (int i = begin; i < begin + kOld; ++i) {
          // The product is exact: a power of two.
          const float value = fmaf(total[i / 2 * 4 + 2 * half + i % 2], unscale, bias);
          if (token(i) < left) to[int64_t{token(i)} * part.rows] = old[i - begin] + value;
        }
      }
    }
  }
};

#ifdef MILLRACE_HAS_WGMMA

// Stages of a cluster: a stage is empty when all warps of both CTAs have read theirs, and only then may
// either be written.
template <class Layout>
using ClusterRing = WideRing<Layout, kClusterCtas * kMultiplyWarps>;

// One thread's copies of all pieces: weights or tokens, of which one kind is this CTA's own, and of the other
// it brings a half to both.
template <Brings kBrings, int kTokens>
__device__ void load_pieces(const LargeProblem<kTokens>& p, const ClusterRing<LargeLayout<kTokens>>& ring) {
  using Layout = LargeLayout<kTokens>;
  const uint32_t rank = blockIdx.x % kClusterCtas;
  const int tiles = static_cast<int>((p.rows + kWgmmaRows - 1) / kWgmmaRows);  // of tokens
  uint32_t slot = 0, parity = 1;
  LargePiece piece;
  for (int k = 0; p.piece(k, piece); ++k) {
    const LargeItem item = p.item(piece.item);
    const int last = p.pairs_until(piece.end);
    // This CTA brings 96 tokens, its own or its half of 192, which are a tile and a half or half a tile and a
    // tile; or 192 of its own. Past the last tile there is nothing: those sums are nobody's.
    const bool half = Layout::kSharesTokens && !item.apart;
    const int first = item.first_token + (half ? static_cast<int>(rank) * 96 : 0);
    const int tile = first / kWgmmaRows, there = min(max(tiles - tile, 0), kTokens / kWgmmaRows + 1);
    const int into = first % kWgmmaRows * ptx::kSwizzleRowBytes;  // 0, or half a tile
    const int mine = Layout::kSharesTokens && item.apart ? kTokens : 96;
    const int bytes = min(there * kWgmmaTileBytes - into, mine * ptx::kSwizzleRowBytes);
    const auto all = static_cast<uint32_t>(
        half ? min(tiles - item.first_token / kWgmmaRows, kTokens / kWgmmaRows) * kWgmmaTileBytes
             : max(bytes, 0));
    const uint8_t* tokens = p.x.data + int64_t{tile} * p.pairs * kWgmmaTileBytes;
    for (int pair = p.pairs_until(piece.begin); pair < last; ++pair) {
      ptx::barrier_wait(ring.empty + slot, parity);
      uint64_t* full = ring.full + slot;
      uint8_t* stage = ring.stages + slot * Layout::kStageBytes;
      if constexpr (kBrings == Brings::kWeights) {
        ptx::barrier_arrive_expect(full, Layout::kTokensAt);
        if constexpr (Layout::kSharesTokens) {
          ptx::box_copy(stage, p.maps + item.part, pair * Layout::kPairBytes, item.first_tile, full);
        } else {
          ptx::box_copy_to(kBothCtas, stage + rank * Layout::kGroupBytes, p.maps + item.part,
                           pair * Layout::kPairBytes,
                           item.first_tile + static_cast<int>(rank) * (kLargeTiles / 2), full);
        }
      } else {
        ptx::barrier_arrive_expect(full, all);
        uint8_t* to = stage + Layout::kTokensAt + (first - item.first_token) * ptx::kSwizzleRowBytes;
        const uint8_t* from = tokens + int64_t{pair} * kWgmmaTileBytes;
        for (int done = 0, at = into; done < bytes; at = 0, from += int64_t{p.pairs} * kWgmmaTileBytes) {
          const int count = min(bytes - done, kWgmmaTileBytes - at);
          if (half) {
            ptx::bulk_copy_to(kBothCtas, to + done, from + at, static_cast<uint32_t>(count), full);
          } else {
            ptx::bulk_copy_kept(to + done, from + at, static_cast<uint32_t>(count), full);
          }
          done += count;
        }
      }
      if (++slot == Layout::kCount) slot = 0, parity ^= 1u;
    }
  }
}

template <class Problem>
struct LargeMultiplier {
  using Layout = typename Problem::Layout;
  const Problem& p;
  const int warp, lane;
  StageCursor<Layout> at;
  const uint32_t other_empty;      // the other CTA's barriers
  int left = 0;                    // pairs of all pieces
  LargePiece before = {-1, 0, 0};  // whose totals have yet to be put where they belong
  float total[Layout::kSums];

  __device__ LargeMultiplier(const Problem& problem, const ClusterRing<Layout>& ring, int warp_index,
                             int lane_index)
      : p(problem),
        warp(warp_index),
        lane(lane_index),
        at(ring.stages, ring.full),
        other_empty(ptx::address_in(blockIdx.x % kClusterCtas ^ 1u, ptx::shared_address(ring.empty))) {}

  // The warp has read the stage before; both CTAs must know, where they write to it again: so nothing is on
  // its way to a CTA that has ended. `left`: stages after it.
  __device__ void release_previous() const {
    const auto before_it = at.previous();
    const int who = left < Layout::kCount ? -1 : lane;
    before_it.release(who);
    if (who == 1) ptx::barrier_arrive_there(other_empty + 8 * before_it.slot);
  }
  // Half of the stage's products, left under way.
  template <int kHalf>
  __device__ void multiply(float (&sum)[Layout::kSums], bool first) const {
    const uint64_t b = at.operand(Layout::second_operand());
    const uint64_t a = at.operand(Layout::first_operand(warp / kGroupWarps));
    if (kHalf == 0) ptx::wgmma_fence();
#pragma unroll
    for (int i = 2 * kHalf; i < 2 * kHalf + 2; ++i)
      ptx::wgmma_bf16(sum, a + 2 * i, b + 2 * i, !first || i > 0);
    ptx::wgmma_commit();
  }
  // Under its first two products the stage before is given back, under the others the next is waited for.
  template <bool kFirst>
  __device__ __forceinline__ void stage(float (&sum)[Layout::kSums]) {
    multiply<0>(sum, kFirst);
    if (!kFirst) {
      ptx::wgmma_wait<1>();
      release_previous();
    }
    multiply<1>(sum, false);
    at.advance();
    if (--left > 0) at.wait();
  }
  // Half of the totals of the piece before.
  template <int kHalf>
  __device__ __forceinline__ void put() const {
    if (before.item < 0) return;
    if (before.end == p.shares.segments) {
      p.template store<kHalf>(p.item(before.item), warp, lane, total);
    } else {
      p.template hand_over<kHalf>(warp, lane, total);
    }
  }
  // The end of a segment: its products are done.
  __device__ __forceinline__ void end_chain(float (&sum)[Layout::kSums]) const {
    ptx::wgmma_wait<0>();
    ptx::hold_sums(sum);
    release_previous();
  }
  // A segment of `count` pairs that is not the first of its piece.
  __device__ __forceinline__ void chain(int count) {
    float sum[Layout::kSums];
    stage<true>(sum);
    for (int j = 1; j < count; ++j) stage<false>(sum);
    end_chain(sum);
#pragma unroll
    for (int i = 0; i < Layout::kSums; ++i) total[i] += sum[i];
  }
  // The first of a piece; under its first products the totals of the piece before are put where they belong.
  __device__ __forceinline__ void first_chain(int count, bool continues) {
    float sum[Layout::kSums];
    stage<true>(sum);
    if (before.item < 0 && warp < kGroupWarps) ptx::named_arrive<1, kMultiplyWarps * kWarpLanes>();
    put<0>();
    if (count > 1) stage<false>(sum);
    put<1>();
    if (continues) p.take_over(warp, lane, total);
    for (int j = 2; j < count; ++j) stage<false>(sum);
    end_chain(sum);
    if (continues) {
#pragma unroll
      for (int i = 0; i < Layout::kSums; ++i) total[i] += sum[i];
    } else {
#pragma unroll
      for (int i = 0; i < Layout::kSums; ++i) total[i] = 0.0f + sum[i];
    }
  }

  __device__ void run() {
    LargePiece piece;
    for (int k = 0; p.piece(k, piece); ++k) left += p.pairs_until(piece.end) - p.pairs_until(piece.begin);
    if (warp >= kGroupWarps) ptx::named_barrier<1, kMultiplyWarps * kWarpLanes>();
    at.wait();
    for (int k = 0; p.piece(k, piece); ++k) {
      const int last = p.pairs_until(piece.end);
      int pair = p.pairs_until(piece.begin);
      first_chain(min(p.segment_pairs, last - pair), piece.begin > 0);
      for (pair += p.segment_pairs; pair < last; pair += p.segment_pairs)
        chain(min(p.segment_pairs, last - pair));
      before = piece;
    }
    put<0>();
    put<1>();
  }
};

#endif  // MILLRACE_HAS_WGMMA

template <class Problem>
__global__ void __launch_bounds__(kThreads, 1) wide_large_kernel(const __grid_constant__ Problem p) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  const ClusterRing<typename Problem::Layout> ring(shared);
  const int warp = static_cast<int>(ptx::warp_uniform(threadIdx.x / kWarpLanes)),
            lane = threadIdx.x % kWarpLanes;
  if (threadIdx.x == 0) ring.init();
  ptx::let_dependents_start();
  __syncwarp();
  ptx::cluster_arrive();
  if (warp < kMultiplyWarps) {
    ptx::more_registers<kConsumerRegisters>();
    ptx::cluster_wait();  // both CTAs' barriers are there
    ptx::wait_for_previous();
    LargeMultiplier<Problem>(p, ring, warp, lane).run();
  } else {
    ptx::fewer_registers<kLoaderRegisters>();
    ptx::cluster_wait();
    if (warp == kMultiplyWarps && lane == 0) {
      load_pieces<Brings::kWeights>(p, ring);  // which no kernel of a step writes
    } else if (warp == kMultiplyWarps + 1 && lane == 0) {
      p.prefetch_maps();
      ptx::wait_for_previous();
      load_pieces<Brings::kTokens>(p, ring);
    }
  }
  // A CTA may end: what comes from the other one, copies and that stages were read, it has waited for.
#else
  __trap();
#endif
}

// Boxes of so many tiles of weights.
inline void map_parts(LargeWork& p, int box_tiles) {
  for (int i = 0; i < p.num_parts; ++i)
    p.maps[i] = map_of<PackedFormat::kBf16>(p.parts[i].tiles, p.parts[i].num_tiles, p.tile_bytes, box_tiles);
}
inline void share_out(LargeWork& p, int32_t items) {
  p.shares.items = items;
  p.shares.segments = static_cast<int32_t>(divide_up(p.pairs, p.segment_pairs));
  int clusters = multiprocessors() / kClusterCtas;
  if (clusters > kMostClusters) clusters = kMostClusters;
  p.shares.clusters = items < clusters ? items : clusters;
  p.shares.share_out(p.split.totals != nullptr);
}

template <class Problem>
void launch_clusters_of(const Problem& p, cudaStream_t stream) {
  constexpr size_t kShared = Problem::Layout::kBytes;
  const auto kernel = wide_large_kernel<Problem>;
  allow_shared_memory(kernel, kShared);
  launch_clusters("wide_large_kernel", kClusterCtas, kernel,
                  dim3(static_cast<unsigned>(p.shares.clusters * kClusterCtas)), kThreads, kShared, stream,
                  p);
}

template <int kTokens>
void launch_large(const WgmmaLinear& linear, WideItems way, float unscale, const WideSplit& split,
                  cudaStream_t stream) {
  using Layout = LargeLayout<kTokens>;
  LargeProblem<kTokens> p{};
  static_cast<WgmmaLinear&>(p) = linear;
  p.unscale = unscale;
  p.split = split;
  p.segment_pairs = way == WideItems::kLoose ? p.pairs : pairs_per_segment(p.pairs);
  int32_t part_tiles[kLargeParts] = {};
  for (int i = 0; i < p.num_parts; ++i) part_tiles[i] = p.parts[i].num_tiles;
  p.grid = LargeGrid<Layout::kSharesTokens>(part_tiles, p.num_parts, p.rows);
  map_parts(p, Layout::kSharesTokens ? kLargeTiles : kLargeTiles / 2);
  share_out(p, p.grid.items());
  launch_clusters_of(p, stream);
}

}  // namespace millrace::cuda
