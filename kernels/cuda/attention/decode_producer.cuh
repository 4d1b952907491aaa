// Decode attention (decode.cu): its shared memory, and its two producer warps, one for tiles of the cache and
// one for the rows' inputs.
#pragma once

#include <type_traits>

#include "kernels/cuda/attention/decode_row.cuh"

namespace millrace::cuda {

inline constexpr int kDecodeConsumerWarps = kTilePages;  // each has a page of a tile
inline constexpr int kDecodeConsumerThreads = kDecodeConsumerWarps * kWarpLanes;
inline constexpr int kDecodeThreads = kDecodeConsumerThreads + 2 * kWarpLanes;
inline constexpr int kDecodeRingBytes = 96 * 1024;

template <int kDim, bool kFp8>
struct DecodeShape : DecodeRowShape<kDim, kFp8> {
  static constexpr int kStages = kDecodeRingBytes / DecodeRowShape<kDim, kFp8>::kStageBytes;  // at most
  static constexpr int kWarpColumns =
      DecodeRowShape<kDim, kFp8>::kColumns / kDecodeConsumerWarps;  // of 8 dimensions, a consumer warp's
  static constexpr int kQueryPad = kFp8 ? 16 : 8;  // floats between heads: no two lanes of a load in one bank
  static constexpr int kCombineBatch = 24 / kWarpColumns;  // splits loaded at once when they are combined
};

// A row's inputs: its queries, and with angles the key and value to be stored.
template <int kDim, bool kFp8>
struct RowInput {
  float query[kMaxHeadGroup][kDim + DecodeShape<kDim, kFp8>::kQueryPad];
  NewRow<kDim> added;
};
inline constexpr int kInputs = 2;

template <int kDim, bool kFp8>
struct DecodeShared {  // behind the ring of stages; who arrives at the barriers: decode_attention_kernel
  using Shape = DecodeShape<kDim, kFp8>;
  RowInput<kDim, kFp8> inputs[kInputs];
  uint64_t full[Shape::kStages], empty[Shape::kStages], input_full[kInputs], input_empty[kInputs];
  float row_max[kMaxHeadGroup][kDecodeConsumerWarps];  // of a tile: of each head, by page
  float page_sums[kDecodeConsumerWarps][kWarpLanes];   // of a page's probabilities, by lane
  uint8_t probs[kMaxHeadGroup * kProbRowBytes];
  float split_max[Shape::kCombineBatch][kMaxHeadGroup];
  float3 factors[Shape::kCombineBatch][kMaxHeadGroup];  // both factors, and the split's row_sum
  int32_t last;
};

// The KV producer, one warp: of each tile the keys, then the values. It waits for `empty`, on which all
// consumer threads arrive, and its copies complete `full`. With angles, the row's own key and value are not
// in the cache yet.
template <int kDim, bool kFp8>
__device__ void produce_kv(const PagedAttention& p, uint8_t* stages, int32_t num_stages,
                           DecodeShared<kDim, kFp8>& shared) {
  const DecodeItems items(p);
  RingPosition at;
  const auto load = [&](auto values, const TileSource& source, int32_t tile) {
    ptx::barrier_wait(shared.empty + at.stage, at.phase ^ 1u);
    constexpr bool kValues = decltype(values)::value;
    uint8_t* stage = stages + at.stage * DecodeShape<kDim, kFp8>::kStageBytes;
    if constexpr (kFp8) {
      load_fp8_tile<kDim, kValues>(source, tile, stage, shared.full + at.stage);
    } else {
      load_tile<kDim, kValues>(source, tile, stage, shared.full + at.stage);
    }
    at = at.next(num_stages);
  };
  for (int32_t i = blockIdx.x; i < items.count; i += gridDim.x) {
    DecodeItem item;
    if (!items.at(i, item)) continue;
    const TileSource source{p.cache, item.table, item.kv_head, item.visible.first / kBlockTokens,
                            item.visible.last + (p.angles == nullptr ? 1 : 0)};
    for (int32_t tile = item.first_tile; tile < item.past_tile; ++tile) {
      load(std::false_type{}, source, tile);
      load(std::true_type{}, source, tile);
    }
  }
}

// The input producer, one warp, a lane per copy: the heads' queries, then key, value and angles.
template <int kDim, bool kFp8>
__device__ void produce_inputs(const PagedAttention& p, DecodeShared<kDim, kFp8>& shared) {
  const DecodeItems items(p);
  const int lane = threadIdx.x % kWarpLanes, group = p.cache.heads / p.cache.kv_heads;
  constexpr uint32_t kRowBytes = kDim * sizeof(float);
  const int extra = p.angles != nullptr ? 3 : 0;
  RingPosition at;
  bool waited = false;
  for (int32_t i = blockIdx.x; i < items.count; i += gridDim.x) {
    DecodeItem item;
    if (!items.at(i, item)) continue;
    if (!waited) ptx::wait_for_previous();  // items are older than the step
    waited = true;
    ptx::barrier_wait(shared.input_empty + at.stage, at.phase ^ 1u);
    uint64_t* full = shared.input_full + at.stage;
    RowInput<kDim, kFp8>& to = shared.inputs[at.stage];
    if (lane == 0) ptx::barrier_arrive_expect(full, static_cast<uint32_t>(group + extra) * kRowBytes);
    __syncwarp();
    const int64_t kv_row = (item.row * p.cache.kv_heads + item.kv_head) * kDim;
    if (lane < group) {
      ptx::bulk_copy_kept(to.query[lane],
                          p.query + (item.row * p.cache.heads + item.kv_head * group + lane) * kDim,
                          kRowBytes, full);
    } else if (lane == group && extra > 0) {
      ptx::bulk_copy_kept(to.added.key, p.key + kv_row, kRowBytes, full);
    } else if (lane == group + 1 && extra > 0) {
      ptx::bulk_copy_kept(to.added.value, p.value + kv_row, kRowBytes, full);
    } else if (lane == group + 2 && extra > 0) {
      ptx::bulk_copy_kept(to.added.cos_sin, p.angles + item.row * (kDim / 2), kRowBytes, full);
    }
    at = at.next(kInputs);
  }
  if (!waited) ptx::wait_for_previous();  // every CTA ends behind the kernel ahead: see launch_as
}

}  // namespace millrace::cuda
