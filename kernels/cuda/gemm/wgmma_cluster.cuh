// Wide linear products of bf16 operands on Hopper's warpgroup instructions, by clusters of two CTAs: for bf16
// weights, and for 8-bit ones that are kept opened (packed.h). An item is two times 128 tokens, or 64 where
// there are few, a CTA each, and as many outputs as are fitted: such that all clusters have the same number
// of items. 2,880 outputs of 512 tokens are 33 x 2 items of 88 outputs for 66 clusters, where 128 x 128
// outputs keep 92 of 132 SMs at work.
//
// Tokens are the rows of the products and weights their columns, of which an instruction takes any multiple
// of eight. Each CTA brings its own tokens, and half of the weights to both. More than 192 outputs do not
// fit: a segment of the columns is one chain of products and is added to the totals at its end
// (tile_format.cuh), so a thread holds 96 sums and 96 totals.
//
// Limits, in cycles for 64 columns of a CTA: the tensor cores, and 40 bytes a cycle from L2 (what 128 x 128
// outputs of CTAs that share nothing got); beside them what was measured, by the clock of the SM, with one
// item a CTA and outputs stored from registers. (By 128 bytes a cycle of shared memory, each warpgroup
// reading both of its operands, 48, 88 and 160 outputs would be 400, 520 and 736: that count is too high.)
//                  tensor cores    L2              measured
//   48 outputs     192             19 KB: 475      292
//   88 outputs     352             21.5 KB: 550    392
//   160 outputs    640             26 KB: 650      661
//
// Nobody waits for outputs: an item's totals leave under the first products of the next (StagedOutputs). The
// second warpgroup begins a stage later than the first, so that one multiplies while the other adds.
//
// Shares: items have all the same length, and are not always a multiple of the clusters. Where it saves more
// than it costs, an item is cut between two segments: one cluster begins with the first of them and hands its
// totals over, another ends with the others, beginning with those totals: the same sums in the same order.
// With at least an item a cluster nobody waits: what is handed over was computed first and is needed last.
//
// kLoose: one chain over all columns. Its bits differ from every other kernel's: it says what equal bits
// cost, and nothing in the engine uses it.
#pragma once

#include "kernels/cuda/gemm/cluster_schedule.h"
#include "kernels/cuda/gemm/wgmma_mainloop.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/grid_sync.cuh"
#include "kernels/cuda/ptx/predicated.cuh"
#include "kernels/cuda/ptx/wgmma_widths.cuh"

namespace millrace::cuda {

inline constexpr uint16_t kBothCtas = 3;
inline constexpr int kMostSums = 96;  // of a thread
inline constexpr int kMostShared = 232448;

// kTiles of weights and kTokens of a CTA. Shared memory: stages of [weights][tokens], barriers; then
// StagedOutputs. The two warpgroups have 64 tokens each and the same outputs; or the same 64 tokens, and half
// of the outputs.
template <int kTiles, int kTokens>
struct FittedLayout {
  static constexpr bool kSameTokens = kTokens == kWgmmaRows;
  static constexpr int kPairBytes = TileFormat<PackedFormat::kBf16>::kPairBytes;
  static constexpr int kTokensAt = kTiles * kPairBytes;
  static constexpr int kStageBytes = kTokensAt + kTokens * ptx::kSwizzleRowBytes;
  static constexpr int kGroupTiles = kSameTokens ? kTiles / 2 : kTiles;  // of a warpgroup
  static constexpr int kSums = 4 * kGroupTiles;                          // of a thread
  // Outputs leave a warp in two parts, of so many tiles, and lie in rows of shared memory meanwhile. Four
  // rows of an odd number of tiles lie in different banks, of ten or six in half of them.
  static constexpr int kLater = kGroupTiles % 2 == 0 ? (kGroupTiles / 2 - 1) / 2 * 2 + 1
                                : kGroupTiles < 10   ? kGroupTiles / 2
                                : kGroupTiles < 16   ? 6
                                                     : 10;
  static constexpr int kSooner = kGroupTiles - kLater;
  static constexpr int kRowFloats = (kSooner > kLater ? kSooner : kLater) * kTileRows;
  static constexpr int kOutputBytes = kMultiplyWarps * (16 * kRowFloats * 4 + kRowFloats * 4 + 8);
  static constexpr int kFits = (kMostShared - kOutputBytes - 128) / kStageBytes;
  static constexpr int kCount = kFits < 8 ? kFits : 8;
  static constexpr int kRingBytes = kCount * kStageBytes + 128;
  static constexpr int kBytes = kRingBytes + kOutputBytes;
  // What a CTA brings to both; of an odd number both bring the one in the middle.
  static constexpr int kBroughtTiles = (kTiles + 1) / 2;
  static_assert(kPairBytes == 1024 && kSums <= kMostSums);
  static_assert(kTokens == 2 * kWgmmaRows || (kSameTokens && kTiles % 2 == 0));
  static_assert(kBytes <= kMostShared && kCount * 2 * 8 <= 128);
  static_assert(kCount >= 4 && kLater > 0 && kSooner > 0 && kStageBytes % 1024 == 0);
  __device__ static constexpr uint32_t first_operand(int group) {
    return static_cast<uint32_t>(kTokensAt + (kSameTokens ? 0 : group * kWgmmaTileBytes));
  }
  __device__ static constexpr uint32_t second_operand(int group) {
    return static_cast<uint32_t>(kSameTokens ? group * kGroupTiles * kPairBytes : 0);
  }
  // A warp's part of a CTA's item: its first tile and token.
  __device__ static ClusterItem of_warp(ClusterItem item, int warp) {
    if (kSameTokens) item.first_tile += warp / kGroupWarps * kGroupTiles;
    item.first_token += 16 * (kSameTokens ? warp % kGroupWarps : warp);
    return item;
  }
};

// What the CTAs of clusters multiply, in pieces.
struct ClusterWork : WgmmaLinear {
  CUtensorMap maps[kMostParts];  // of the parts
  int32_t segment_pairs;
  float unscale;
  WideSplit split;
  ClusterShares shares;

  __device__ int pairs_until(int segment) const { return min(segment * segment_pairs, pairs); }
  __device__ bool piece(int k, ClusterPiece& piece) const {
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

// A warp's totals on their way to memory, in two parts: from registers to rows in shared memory, from where a
// copy takes them while the products go on. (From registers, eight bytes of a lane, they take three
// microseconds of an item of 160 outputs: 32 bytes in a piece, one in two cycles. The last item's do, for
// there it takes less than a copy of each part after the other.) What they are added to, and the bias, lies
// there before: asked for under the last segment of the item, and, for the second part, when the first is
// out.
template <class Problem>
struct StagedOutputs {
  using Layout = typename Problem::Layout;
  static constexpr int kTokens = 16;  // of a warp
  const Problem& p;
  const int lane;
  float *const rows, *const bias_row;  // [16 tokens][outputs of a part]; [outputs]
  uint64_t* const there;               // completes when what was asked for is
  uint32_t parity = 0;

  // `shared`: rows of all warps, their biases, their barriers.
  static constexpr int kBiasAt = kMultiplyWarps * kTokens * Layout::kRowFloats * 4;
  static constexpr int kBarriersAt = kBiasAt + kMultiplyWarps * Layout::kRowFloats * 4;
  __device__ StagedOutputs(const Problem& problem, uint8_t* shared, int warp_index, int lane_index)
      : p(problem),
        lane(lane_index),
        rows(reinterpret_cast<float*>(shared) + warp_index * kTokens * Layout::kRowFloats),
        bias_row(reinterpret_cast<float*>(shared + kBiasAt) + warp_index * Layout::kRowFloats),
        there(reinterpret_cast<uint64_t*>(shared + kBarriersAt) + warp_index) {}
  __device__ static void init(uint8_t* shared) {
    for (int i = 0; i < kMultiplyWarps; ++i)
      ptx::barrier_init(reinterpret_cast<uint64_t*>(shared + kBarriersAt) + i, 1);
  }

  // Which outputs, tiles kFirst to kLast of the warp's, of which tokens. (Items are the warp's here.)
  template <int kHalf>
  struct Half {
    static constexpr int kFirst = kHalf == 0 ? 0 : Layout::kSooner;
    static constexpr int kLast = kHalf == 0 ? Layout::kSooner : Layout::kSooner + Layout::kLater;
    static constexpr int kOutputs = (kLast - kFirst) * kTileRows;
    int output, token;
    __device__ explicit Half(const ClusterItem& item)
        : output((item.first_tile + kFirst) * kTileRows), token(item.first_token) {}
  };

  template <int kHalf>
  __device__ void ask(const ClusterItem& item) const {
    const auto& part = p.parts[item.part];
    const bool bias = part.bias != nullptr;
    if (!p.copied[item.part] || (!p.add && !bias)) return;
    ptx::publish_to_async();  // what was there has been read
    __syncwarp();
    if (lane != 0) return;
    using H = Half<kHalf>;
    const H half(item);
    const int biases = bias ? min(max(part.rows - half.output, 0), H::kOutputs) : 0;
    ptx::barrier_arrive_expect(
        there, static_cast<uint32_t>((p.add ? kTokens * H::kOutputs : 0) + biases) * sizeof(float));
    if (biases > 0)
      ptx::bulk_copy_kept(bias_row, part.bias + half.output,
                          static_cast<uint32_t>(biases) * static_cast<uint32_t>(sizeof(float)), there);
    if (!p.add) return;
    ptx::bulk_store_wait();
    ptx::box_copy(rows, &p.out_maps[item.part][kHalf], half.output * 4, half.token, there);
  }

  template <int kHalf, int kSums>
  __device__ __forceinline__ void put(const ClusterItem& item, const float (&total)[kSums]) {
    const auto& part = p.parts[item.part];
    if (!p.copied[item.part]) return put_directly<kHalf>(item, total);
    const bool bias = part.bias != nullptr;
    if (p.add || bias) {
      ptx::barrier_wait(there, parity);
      parity ^= 1;
    }
    if (!p.add) {
      if (lane == 0) ptx::bulk_store_wait();
      __syncwarp();
    }
    p.add ? to_rows<kHalf, true>(total, bias) : to_rows<kHalf, false>(total, bias);
    ptx::publish_to_async();
    __syncwarp();
    if (lane == 0) {
      const Half<kHalf> half(item);
      ptx::box_store(&p.out_maps[item.part][kHalf], half.output * 4, half.token, rows);
      ptx::bulk_store_end();
    }
  }
  // Lane (g, t): outputs 8j + 2t and + 1 of tokens g and g + 8.
  template <int kHalf, bool kAdd, int kSums>
  __device__ __forceinline__ void to_rows(const float (&total)[kSums], bool has_bias) const {
    using H = Half<kHalf>;
    const float* bias = bias_row + 2 * (lane % 4);
    float* to = rows + lane / 4 * H::kOutputs + 2 * (lane % 4);
#pragma unroll
    for (int j = H::kFirst; j < H::kLast; ++j) {
      float2 more = make_float2(0.0f, 0.0f);
      if (has_bias) more = *reinterpret_cast<const float2*>(bias + 8 * (j - H::kFirst));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        auto* at = reinterpret_cast<float2*>(to + 8 * i * H::kOutputs + 8 * (j - H::kFirst));
        // The products are exact: a power of two.
        float2 value = make_float2(fmaf(total[4 * j + 2 * i], p.unscale, more.x),
                                   fmaf(total[4 * j + 2 * i + 1], p.unscale, more.y));
        if (kAdd) {
          const float2 old = *at;
          value = make_float2(old.x + value.x, old.y + value.y);
        }
        *at = value;
      }
    }
  }

  // The last item's, and those of rows whose length or place is no multiple of sixteen bytes.
  template <int kHalf, int kSums>
  __device__ void put_directly(const ClusterItem& item, const float (&total)[kSums]) const {
    const auto& part = p.parts[item.part];
    if (part.rows % 2 == 0 && reinterpret_cast<uintptr_t>(part.out) % sizeof(float2) == 0) {
      store_as<kHalf, true>(part, item, total);
    } else {
      store_as<kHalf, false>(part, item, total);
    }
  }
  // kTwo: two outputs at once.
  template <int kHalf, bool kTwo, int kSums>
  __device__ __forceinline__ void store_as(const WgmmaLinear::Part& part, const ClusterItem& item,
                                           const float (&total)[kSums]) const {
    using H = Half<kHalf>;
    constexpr int kAtOnce = 4;  // pairs of outputs that are added to: registers
    const int first_output = item.first_tile * kTileRows + 2 * (lane % 4);
    const int left = part.rows - first_output;  // outputs from there on
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = item.first_token + lane / 4 + 8 * half;
      if (token >= p.rows) continue;
      float* to = part.out + int64_t{token} * part.rows + first_output;
#pragma unroll
      for (int begin = H::kFirst; begin < H::kLast; begin += kAtOnce) {
        const int count = H::kLast - begin < kAtOnce ? H::kLast - begin : kAtOnce;
        // Asked for before anything is stored; what changes nothing, where nothing is added.
        float old[2 * kAtOnce], bias[2 * kAtOnce];
#pragma unroll
        for (int i = 0; i < 2 * count; ++i) {
          const int output = 8 * (begin + i / 2) + i % 2;
          old[i] = -0.0f, bias[i] = 0.0f;
          ptx::load_if(p.add && output < left, to + output, old[i]);
          ptx::load_if(part.bias != nullptr && output < left, part.bias + first_output + output, bias[i]);
        }
#pragma unroll
        for (int i = 0; i < 2 * count; i += 2) {
          const int output = 8 * (begin + i / 2), at = 4 * (begin + i / 2) + 2 * half;
          const float a = old[i] + fmaf(total[at], p.unscale, bias[i]);
          const float b = old[i + 1] + fmaf(total[at + 1], p.unscale, bias[i + 1]);
          if (kTwo) {
            if (output < left) *reinterpret_cast<float2*>(to + output) = make_float2(a, b);
          } else {
            if (output < left) to[output] = a;
            if (output + 1 < left) to[output + 1] = b;
          }
        }
      }
    }
  }
  // Shared memory may go when it has been read.
  __device__ void end() const {
    if (lane == 0) ptx::bulk_store_wait();
  }
};

template <int kTiles, int kTokens>
struct FittedProblem : ClusterWork {
  using Layout = FittedLayout<kTiles, kTokens>;
  using Outputs = StagedOutputs<FittedProblem>;
  CUtensorMap rows_map, out_maps[kMostParts][2];
  FittedGrid grid;
  bool copied[kMostParts];  // a part's outputs, by boxes

  __device__ ClusterItem item(int i) const {
    return grid.item(i, static_cast<int>(blockIdx.x % kClusterCtas));
  }
};

#ifdef MILLRACE_HAS_WGMMA

// Stages of a cluster: a stage is empty when all warps of both CTAs have read theirs, and only then may
// either be written.
template <class Layout>
using ClusterRing = WideRing<Layout, kClusterCtas * kMultiplyWarps>;

// One thread's copies of all pieces, for every other stage.
template <Brings kBrings, int kTiles, int kTokens>
__device__ void load_pieces(const FittedProblem<kTiles, kTokens>& p,
                            const ClusterRing<FittedLayout<kTiles, kTokens>>& ring, bool turn) {
  using Layout = FittedLayout<kTiles, kTokens>;
  const int mine = static_cast<int>(blockIdx.x % kClusterCtas) * (kTiles - Layout::kBroughtTiles);
  uint32_t slot = 0, parity = 1;
  ClusterPiece piece;
  for (int k = 0; p.piece(k, piece); ++k) {
    const ClusterItem item = p.item(piece.item);
    const int last = p.pairs_until(piece.end);
    for (int pair = p.pairs_until(piece.begin); pair < last; ++pair) {
      if (turn) {
        ptx::barrier_wait(ring.empty + slot, parity);
        uint64_t* full = ring.full + slot;
        uint8_t* stage = ring.stages + slot * Layout::kStageBytes;
        if constexpr (kBrings == Brings::kWeights) {
          ptx::barrier_arrive_expect(full, kClusterCtas * Layout::kBroughtTiles * Layout::kPairBytes);
          ptx::box_copy_to(kBothCtas, stage + mine * Layout::kPairBytes, p.maps + item.part,
                           pair * Layout::kPairBytes, item.first_tile + mine, full);
        } else {
          ptx::barrier_arrive_expect(full, Layout::kStageBytes - Layout::kTokensAt);
          ptx::kilobyte_box_copy(stage + Layout::kTokensAt, &p.rows_map, pair * (kWgmmaTileBytes / 1024),
                                 item.first_token / kWgmmaRows, full);
        }
      }
      turn = !turn;
      if (++slot == Layout::kCount) slot = 0, parity ^= 1u;
    }
  }
}

template <class Problem>
struct ClusterMultiplier {
  using Layout = typename Problem::Layout;
  const Problem& p;
  const int warp, lane;
  StageCursor<Layout> at;
  const uint32_t other_empty;        // the other CTA's barriers
  int left = 0;                      // pairs of all pieces
  ClusterPiece before = {-1, 0, 0};  // whose totals have yet to be put where they belong
  typename Problem::Outputs outputs;
  float total[Layout::kSums];

  __device__ ClusterMultiplier(const Problem& problem, const ClusterRing<Layout>& ring, int warp_index,
                               int lane_index)
      : p(problem),
        warp(warp_index),
        lane(lane_index),
        at(ring.stages, ring.full),
        other_empty(ptx::address_in(blockIdx.x % kClusterCtas ^ 1u, ptx::shared_address(ring.empty))),
        outputs(problem, ring.stages + Layout::kRingBytes, warp_index, lane_index) {}

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
    const uint64_t b = at.operand(Layout::second_operand(warp / kGroupWarps));
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
  __device__ ClusterItem item_of(const ClusterPiece& piece) const {
    return Layout::of_warp(p.item(piece.item), warp);
  }
  // A part of the totals of the piece before.
  template <int kHalf, bool kEnd = false>
  __device__ __forceinline__ void put() {
    if (before.item < 0) return;
    if (before.end != p.shares.segments) {
      p.template hand_over<kHalf>(warp, lane, total);
    } else if (kEnd) {
      outputs.template put_directly<kHalf>(item_of(before), total);
    } else {
      outputs.template put<kHalf>(item_of(before), total);
    }
  }
  // What is added to a part of a piece's totals is asked for.
  template <int kHalf>
  __device__ __forceinline__ void ask(const ClusterPiece& piece) {
    if (piece.item >= 0 && piece.end == p.shares.segments) outputs.template ask<kHalf>(item_of(piece));
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
  // The first of a piece; under its first products the totals of the piece before leave.
  __device__ __forceinline__ void first_chain(int count, bool continues) {
    float sum[Layout::kSums];
    stage<true>(sum);
    if (before.item < 0 && warp < kGroupWarps) ptx::named_arrive<1, kMultiplyWarps * kWarpLanes>();
    put<0>();
    if (count > 1) stage<false>(sum);
    ask<1>(before);
    if (count > 2) stage<false>(sum);
    put<1>();
    if (continues) p.take_over(warp, lane, total);
    for (int j = 3; j < count; ++j) stage<false>(sum);
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
    ClusterPiece piece, next;
    for (int k = 0; p.piece(k, piece); ++k) left += p.pairs_until(piece.end) - p.pairs_until(piece.begin);
    if (warp >= kGroupWarps) ptx::named_barrier<1, kMultiplyWarps * kWarpLanes>();
    at.wait();
    for (int k = 0; p.piece(k, piece); ++k) {
      const int last = p.pairs_until(piece.end);
      int pair = p.pairs_until(piece.begin);
      first_chain(min(p.segment_pairs, last - pair), piece.begin > 0);
      pair += p.segment_pairs;
      const bool leaves_later = p.piece(k + 1, next);
      if (leaves_later && pair >= last) ask<0>(piece);
      for (; pair < last; pair += p.segment_pairs) {
        if (leaves_later && pair + p.segment_pairs >= last) ask<0>(piece);
        chain(min(p.segment_pairs, last - pair));
      }
      before = piece;
    }
    put<0, true>();
    put<1, true>();
    outputs.end();
  }
};

#endif  // MILLRACE_HAS_WGMMA

template <class Problem>
__global__ void __launch_bounds__(kThreads, 1) wide_fitted_kernel(const __grid_constant__ Problem p) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  const ClusterRing<typename Problem::Layout> ring(shared);
  const int warp = static_cast<int>(ptx::warp_uniform(threadIdx.x / kWarpLanes)),
            lane = threadIdx.x % kWarpLanes;
  if (threadIdx.x == 0) {
    ring.init();
    Problem::Outputs::init(shared + Problem::Layout::kRingBytes);
    ptx::barrier_init_fence();
  }
  ptx::let_dependents_start();
  __syncwarp();
  ptx::cluster_arrive();
  if (warp < kMultiplyWarps) {
    ptx::more_registers<kConsumerRegisters>();
    ptx::cluster_wait();  // both CTAs' barriers are there
    ptx::wait_for_previous();
    ClusterMultiplier<Problem>(p, ring, warp, lane).run();
  } else {
    ptx::fewer_registers<kLoaderRegisters>();
    ptx::cluster_wait();
    const int loader = warp - kMultiplyWarps;
    if (lane == 0 && loader % 2 == 0) {
      load_pieces<Brings::kWeights>(p, ring, loader == 0);  // which no kernel of a step writes
    } else if (lane == 0) {
      ptx::prefetch_map(&p.rows_map);
      ptx::wait_for_previous();
      load_pieces<Brings::kTokens>(p, ring, loader == 1);
    }
  }
  // A CTA may end: what comes from the other one, copies and that stages were read, it has waited for.
#else
  __trap();
#endif
}

template <int kTiles, int kTokens>
void launch_fitted_as(const WgmmaLinear& linear, bool loose, float unscale, const WideSplit& split,
                      const Launch& at) {
  using Problem = FittedProblem<kTiles, kTokens>;
  using Layout = typename Problem::Layout;
  Problem p{};
  static_cast<WgmmaLinear&>(p) = linear;
  p.unscale = unscale;
  p.split = split;
  p.segment_pairs = loose ? p.pairs : pairs_per_segment(p.pairs);
  int32_t part_tiles[kMostParts] = {};
  p.rows_map = rows_map_of(p.x, divide_up(p.rows, kWgmmaRows), p.pairs, kTokens / kWgmmaRows);
  for (int i = 0; i < p.num_parts; ++i) {
    const WgmmaLinear::Part& part = p.parts[i];
    part_tiles[i] = part.num_tiles;
    p.maps[i] = map_of<PackedFormat::kBf16>(part.tiles, part.num_tiles, p.tile_bytes, Layout::kBroughtTiles);
    const auto ends = reinterpret_cast<uintptr_t>(part.out) | reinterpret_cast<uintptr_t>(part.bias);
    p.copied[i] = part.rows % 4 == 0 && ends % 16 == 0;
    for (const int later : {0, 1}) {
      if (!p.copied[i]) continue;
      const int outputs = (later == 1 ? Layout::kLater : Layout::kSooner) * kTileRows;
      p.out_maps[i][later] = ptx::byte_rows_map(part.out, static_cast<uint64_t>(p.rows),
                                                static_cast<uint64_t>(part.rows) * sizeof(float),
                                                Problem::Outputs::kTokens, outputs * sizeof(float));
    }
  }
  p.grid = FittedGrid(part_tiles, p.num_parts, p.rows, {kTiles, kTokens});
  p.shares.items = p.grid.items();
  p.shares.segments = static_cast<int32_t>(divide_up(p.pairs, p.segment_pairs));
  int clusters = at.device.sm_count() / kClusterCtas;
  if (clusters > kMostClusters) clusters = kMostClusters;
  p.shares.clusters = p.shares.items < clusters ? p.shares.items : clusters;
  const SharedOut shared(p.shares.items, clusters, FittedChoice::item_time({kTiles, kTokens}), p.pairs,
                         split.totals != nullptr);
  p.shares.share_out(shared.cut || (split.totals != nullptr && split.always));
  constexpr size_t kShared = Layout::kBytes;
  const auto kernel = wide_fitted_kernel<Problem>;
  allow_shared_memory(kernel, kShared);
  launch_clusters("wide_fitted_kernel", kClusterCtas, kernel,
                  dim3(static_cast<unsigned>(p.shares.clusters * kClusterCtas)), kThreads, kShared, at, p);
}

}  // namespace millrace::cuda
