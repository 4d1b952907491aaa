// GEMM by clusters (wgmma_cluster.cuh): how stages and outputs lie in shared memory, how a work item that is
// split along K is passed on, and the epilogue that stores an item's totals while the next is multiplied.
#pragma once

#include "kernels/cuda/gemm/cluster_schedule.h"
#include "kernels/cuda/gemm/wgmma_epilogue.cuh"
#include "millrace/kernels/tile/ptx/grid_sync.cuh"
#include "millrace/kernels/tile/ptx/predicated.cuh"

namespace millrace::cuda {

inline constexpr int kMaxAccumulators = 96;  // of a thread

// kTiles of weights and kTokens of a CTA. Shared memory: stages of [weights][tokens], barriers; then
// StagedEpilogue. The two consumer warpgroups have 64 tokens each and the same outputs; or the same 64
// tokens, and half of the outputs.
template <int kTiles, int kTokens>
struct ClusterStageLayout {
  static constexpr bool kSameTokens = kTokens == kWgmmaRows;
  static constexpr int kKStepBytes = TileFormat<PackedFormat::kBf16>::kKStepBytes;
  static constexpr int kTokensAt = kTiles * kKStepBytes;
  static constexpr int kStageBytes = kTokensAt + kTokens * ptx::kSwizzleRowBytes;
  static constexpr int kWarpgroupTiles = kSameTokens ? kTiles / 2 : kTiles;  // of a warpgroup
  static constexpr int kAccumulators = 4 * kWarpgroupTiles;                  // of a thread
  // Outputs leave a warp in two halves, of so many tiles, and lie in rows of shared memory meanwhile. Four
  // rows of an odd number of tiles lie in different banks, of ten or six in half of them.
  static constexpr int kSecondHalfTiles = kWarpgroupTiles % 2 == 0 ? (kWarpgroupTiles / 2 - 1) / 2 * 2 + 1
                                          : kWarpgroupTiles < 10   ? kWarpgroupTiles / 2
                                          : kWarpgroupTiles < 16   ? 6
                                                                   : 10;
  static constexpr int kFirstHalfTiles = kWarpgroupTiles - kSecondHalfTiles;
  static constexpr int kRowFloats =
      (kFirstHalfTiles > kSecondHalfTiles ? kFirstHalfTiles : kSecondHalfTiles) * kTileRows;
  static constexpr int kOutputBytes = kConsumerWarps * (16 * kRowFloats * 4 + kRowFloats * 4 + 8);
  static constexpr int kFits = (kMaxSharedBytes - kOutputBytes - 128) / kStageBytes;
  static constexpr int kCount = kFits < 8 ? kFits : 8;
  static constexpr int kRingBytes = kCount * kStageBytes + 128;
  static constexpr int kBytes = kRingBytes + kOutputBytes;
  // What a CTA loads to both; of an odd number both load the one in the middle.
  static constexpr int kLoadedTiles = (kTiles + 1) / 2;
  static_assert(kKStepBytes == 1024 && kAccumulators <= kMaxAccumulators);
  static_assert(kTokens == 2 * kWgmmaRows || (kSameTokens && kTiles % 2 == 0));
  static_assert(kBytes <= kMaxSharedBytes && kCount * 2 * 8 <= 128);
  static_assert(kCount >= 4 && kSecondHalfTiles > 0 && kFirstHalfTiles > 0 && kStageBytes % 1024 == 0);
  __device__ static constexpr uint32_t first_operand(int warpgroup) {
    return static_cast<uint32_t>(kTokensAt + (kSameTokens ? 0 : warpgroup * kWgmmaTileBytes));
  }
  __device__ static constexpr uint32_t second_operand(int warpgroup) {
    return static_cast<uint32_t>(kSameTokens ? warpgroup * kWarpgroupTiles * kKStepBytes : 0);
  }
  // A warp's part of a CTA's item: its first tile and token.
  __device__ static ClusterItem of_warp(ClusterItem item, int warp) {
    if (kSameTokens) item.first_tile += warp / ptx::kWarpgroupWarps * kWarpgroupTiles;
    item.first_token += 16 * (kSameTokens ? warp % ptx::kWarpgroupWarps : warp);
    return item;
  }
};

// What the CTAs of clusters multiply, in pieces of work items, and how a split item is passed on.
struct ClusterGemm : WgmmaGemm {
  CUtensorMap maps[kMaxParts];  // of the parts
  int32_t segment_k_steps;
  float unscale;
  SplitWorkspace split;
  ClusterSchedule schedule;

  __device__ int k_steps_until(int segment) const { return min(segment * segment_k_steps, k_steps); }
  __device__ bool piece(int k, ClusterPiece& piece) const {
    return schedule.piece(static_cast<int>(blockIdx.x / kClusterCtas), k, piece);
  }

  // Totals that another CTA goes on with: those of CTA `from`, [quad of accumulators][thread].
  __device__ float4* partial_of(int from) const {
    constexpr int64_t kQuads = kConsumerWarps * kWarpLanes * kMaxAccumulators / 4;
    return reinterpret_cast<float4*>(split.totals) + from * kQuads;
  }
  // To the same CTA of the cluster before, which waits for `ready`: a count of each warp.
  template <int kHalf, int kAccumulators>
  __device__ void store_partial(int warp, int lane, const float (&total)[kAccumulators]) const {
    constexpr int kQuads = kAccumulators / 4;
    const int cta = static_cast<int>(blockIdx.x);
    float4* to = partial_of(cta) + warp * kWarpLanes + lane;
#pragma unroll
    for (int i = kHalf * (kQuads / 2); i < (kHalf == 0 ? kQuads / 2 : kQuads); ++i) {
      to[i * (kConsumerWarps * kWarpLanes)] =
          make_float4(total[4 * i], total[4 * i + 1], total[4 * i + 2], total[4 * i + 3]);
    }
    if (kHalf == 0) return;
    __threadfence();
    __syncwarp();
    if (lane == 0) ptx::add_release(split.ready + cta * kConsumerWarps + warp, 1);
  }
  // From the same CTA of the next cluster, once that has stored them.
  template <int kAccumulators>
  __device__ void load_partial(int warp, int lane, float (&total)[kAccumulators]) const {
    const int from = static_cast<int>(blockIdx.x) + kClusterCtas;
    uint32_t* ready = split.ready + from * kConsumerWarps + warp;
    ptx::wait_count(ready, 1);
    const float4* totals = partial_of(from) + warp * kWarpLanes + lane;
#pragma unroll
    for (int i = 0; i < kAccumulators / 4; ++i) {
      const float4 four = __ldcg(totals + i * (kConsumerWarps * kWarpLanes));
      total[4 * i] = four.x, total[4 * i + 1] = four.y, total[4 * i + 2] = four.z, total[4 * i + 3] = four.w;
    }
    __syncwarp();
    if (lane == 0) *ready = 0;  // for the next product
  }
};

// A warp's totals on their way to memory, in two halves: from registers to rows in shared memory, from where
// a copy takes them while the products go on. (From registers, eight bytes of a lane, they take three
// microseconds of an item of 160 outputs: 32 bytes at a time, one in two cycles. The last item's do, for
// there it takes less than a copy of each half after the other.) What they are added to, and the bias, lies
// in those rows before: prefetched under the last segment of the item, and, for the second half, when the
// first is out.
template <class Problem>
struct StagedEpilogue {
  using Layout = typename Problem::Layout;
  static constexpr int kTokens = 16;  // of a warp
  const Problem& p;
  const int lane;
  float *const rows, *const bias_row;  // [16 tokens][outputs of a half]; [outputs]
  uint64_t* const loaded;              // completes when what was prefetched is there
  uint32_t parity = 0;

  // `shared`: rows of all warps, their biases, their barriers.
  static constexpr int kBiasAt = kConsumerWarps * kTokens * Layout::kRowFloats * 4;
  static constexpr int kBarriersAt = kBiasAt + kConsumerWarps * Layout::kRowFloats * 4;
  __device__ StagedEpilogue(const Problem& problem, uint8_t* shared, int warp_index, int lane_index)
      : p(problem),
        lane(lane_index),
        rows(reinterpret_cast<float*>(shared) + warp_index * kTokens * Layout::kRowFloats),
        bias_row(reinterpret_cast<float*>(shared + kBiasAt) + warp_index * Layout::kRowFloats),
        loaded(reinterpret_cast<uint64_t*>(shared + kBarriersAt) + warp_index) {}
  __device__ static void init(uint8_t* shared) {
    for (int i = 0; i < kConsumerWarps; ++i)
      ptx::barrier_init(reinterpret_cast<uint64_t*>(shared + kBarriersAt) + i, 1);
  }

  // Which outputs, tiles kFirst to kLast of the warp's, of which tokens. (Items are the warp's here.)
  template <int kHalf>
  struct Half {
    static constexpr int kFirst = kHalf == 0 ? 0 : Layout::kFirstHalfTiles;
    static constexpr int kLast =
        kHalf == 0 ? Layout::kFirstHalfTiles : Layout::kFirstHalfTiles + Layout::kSecondHalfTiles;
    static constexpr int kOutputs = (kLast - kFirst) * kTileRows;
    int output, token;
    __device__ explicit Half(const ClusterItem& item)
        : output((item.first_tile + kFirst) * kTileRows), token(item.first_token) {}
  };

  template <int kHalf>
  __device__ void prefetch(const ClusterItem& item) const {
    const auto& part = p.parts[item.part];
    const bool bias = part.bias != nullptr;
    if (!p.by_boxes[item.part] || (!p.add && !bias)) return;
    ptx::publish_to_async();  // what was there has been read
    __syncwarp();
    if (lane != 0) return;
    using H = Half<kHalf>;
    const H half(item);
    const int biases = bias ? min(max(part.rows - half.output, 0), H::kOutputs) : 0;
    ptx::barrier_arrive_expect(
        loaded, static_cast<uint32_t>((p.add ? kTokens * H::kOutputs : 0) + biases) * sizeof(float));
    if (biases > 0)
      ptx::bulk_copy_kept(bias_row, part.bias + half.output,
                          static_cast<uint32_t>(biases) * static_cast<uint32_t>(sizeof(float)), loaded);
    if (!p.add) return;
    ptx::bulk_store_wait();
    ptx::tma_load_2d(rows, &p.out_maps[item.part][kHalf], half.output * 4, half.token, loaded);
  }

  template <int kHalf, int kAccumulators>
  __device__ __forceinline__ void store(const ClusterItem& item, const float (&total)[kAccumulators]) {
    const auto& part = p.parts[item.part];
    if (!p.by_boxes[item.part]) return store_directly<kHalf>(item, total);
    const bool bias = part.bias != nullptr;
    if (p.add || bias) {
      ptx::barrier_wait(loaded, parity);
      parity ^= 1;
    }
    if (!p.add) {
      if (lane == 0) ptx::bulk_store_wait();
      __syncwarp();
    }
    p.add ? add_to_rows<kHalf, true>(total, bias) : add_to_rows<kHalf, false>(total, bias);
    ptx::publish_to_async();
    __syncwarp();
    if (lane == 0) {
      const Half<kHalf> half(item);
      ptx::tma_store_2d(&p.out_maps[item.part][kHalf], half.output * 4, half.token, rows);
      ptx::bulk_store_commit();
    }
  }
  // Lane (g, t): outputs 8j + 2t and + 1 of tokens g and g + 8.
  template <int kHalf, bool kAdd, int kAccumulators>
  __device__ __forceinline__ void add_to_rows(const float (&total)[kAccumulators], bool has_bias) const {
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
  template <int kHalf, int kAccumulators>
  __device__ void store_directly(const ClusterItem& item, const float (&total)[kAccumulators]) const {
    const auto& part = p.parts[item.part];
    if (part.rows % 2 == 0 && reinterpret_cast<uintptr_t>(part.out) % sizeof(float2) == 0) {
      store_outputs<kHalf, true>(part, item, total);
    } else {
      store_outputs<kHalf, false>(part, item, total);
    }
  }
  // kTwo: two outputs at once.
  template <int kHalf, bool kTwo, int kAccumulators>
  __device__ __forceinline__ void store_outputs(const WgmmaGemm::Part& part, const ClusterItem& item,
                                                const float (&total)[kAccumulators]) const {
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
        // Loaded before anything is stored; what changes nothing, where nothing is added.
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

}  // namespace millrace::cuda
