// Attention of single rows (packed_attention.cu): its shared memory, its items, and the two warps that bring
// tiles of the cache and the rows' inputs to it.
#pragma once

#include <type_traits>

#include "kernels/cuda/attention/decode_row.cuh"

namespace millrace::cuda {

inline constexpr int kWarps = kTilePages;  // that multiply
inline constexpr int kMultiplyThreads = kWarps * kWarpLanes;
inline constexpr int kThreads = kMultiplyThreads + 2 * kWarpLanes;
inline constexpr int kRingBytes = 96 * 1024;

template <int kDim, bool kFp8>
struct DecodeShape : RowShape<kDim, kFp8> {
  static constexpr int kSlots = kRingBytes / RowShape<kDim, kFp8>::kSlotBytes;  // at most
  static constexpr int kWarpColumns = RowShape<kDim, kFp8>::kColumns / kWarps;  // of the values, a warp's
  static constexpr int kQueryPad = kFp8 ? 16 : 8;  // floats between heads: lanes of a load meet no bank twice
  static constexpr int kBatch = 24 / kWarpColumns;  // spans asked for at once when they are added up
};

// What a row brings: its queries, and with angles the key and value to be stored.
template <int kDim, bool kFp8>
struct RowInput {
  float query[kMaxHeadGroup][kDim + DecodeShape<kDim, kFp8>::kQueryPad];
  NewRow<kDim> added;
};
inline constexpr int kInputs = 2;

template <int kDim, bool kFp8>
struct DecodeShared {  // behind the slots
  using Shape = DecodeShape<kDim, kFp8>;
  RowInput<kDim, kFp8> inputs[kInputs];
  uint64_t full[Shape::kSlots], empty[Shape::kSlots], input_full[kInputs], input_empty[kInputs];
  float tops[kMaxHeadGroup][kWarps];  // of each head, by page
  float sums[kWarps][kWarpLanes];     // of a page's weights, by lane
  uint8_t weights[kMaxHeadGroup * kWeightRow];
  float span_tops[Shape::kBatch][kMaxHeadGroup];
  float3 merges[Shape::kBatch][kMaxHeadGroup];  // factors, and the span's weight
  int32_t last;
};

// One warp. With angles, the row's own key and value are not in the cache yet.
template <int kDim, bool kFp8>
__device__ void bring_items(const PackedAttention& p, uint8_t* slots, int32_t num_slots,
                            DecodeShared<kDim, kFp8>& shared) {
  const Items items(p);
  Place place;
  const auto bring = [&](auto values, const TileSource& source, int32_t tile) {
    ptx::barrier_wait(shared.empty + place.slot, place.phase ^ 1u);
    constexpr bool kValues = decltype(values)::value;
    uint8_t* slot = slots + place.slot * DecodeShape<kDim, kFp8>::kSlotBytes;
    if constexpr (kFp8) {
      bring_fp8_tile<kDim, kValues>(source, tile, slot, shared.full + place.slot);
    } else {
      bring_tile<kDim, kValues>(source, tile, slot, shared.full + place.slot);
    }
    place = place.next(num_slots);
  };
  for (int32_t i = blockIdx.x; i < items.count; i += gridDim.x) {
    Item item;
    if (!items.at(i, item)) continue;
    const TileSource source{p.cache, item.table, item.kv_head, item.sight.first / kBlockTokens,
                            item.sight.last + (p.angles == nullptr ? 1 : 0)};
    for (int32_t tile = item.first_tile; tile < item.past_tile; ++tile) {
      bring(std::false_type{}, source, tile);
      bring(std::true_type{}, source, tile);
    }
  }
}

// One warp, a lane per copy: the heads' queries, then key, value and angles.
template <int kDim, bool kFp8>
__device__ void bring_inputs(const PackedAttention& p, DecodeShared<kDim, kFp8>& shared) {
  const Items items(p);
  const int lane = threadIdx.x % kWarpLanes, group = p.cache.heads / p.cache.kv_heads;
  constexpr uint32_t kRowBytes = kDim * sizeof(float);
  const int extra = p.angles != nullptr ? 3 : 0;
  Place place;
  for (int32_t i = blockIdx.x; i < items.count; i += gridDim.x) {
    Item item;
    if (!items.at(i, item)) continue;
    ptx::barrier_wait(shared.input_empty + place.slot, place.phase ^ 1u);
    uint64_t* full = shared.input_full + place.slot;
    RowInput<kDim, kFp8>& to = shared.inputs[place.slot];
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
      ptx::bulk_copy_kept(to.added.turns, p.angles + item.row * (kDim / 2), kRowBytes, full);
    }
    place = place.next(kInputs);
  }
}

}  // namespace millrace::cuda
