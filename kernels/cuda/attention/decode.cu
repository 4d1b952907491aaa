// Attention of single rows over the paged cache on the tensor cores: all query heads of a KV head at once, so
// that keys and values are read once for the group. The numbers are those of packed_attention.cuh.
//
// An item is one span of one row and KV head, or the whole row where there are enough of them; a CTA walks
// its share of the items. One warp brings tiles of 128 positions by bulk copies, page by page, up to 96 KB
// ahead, in a step of single tokens before the kernel ahead has ended; another brings queries, new keys and
// values, an item ahead. Eight warps multiply: of a tile's scores each has one page of 16 positions; largest
// scores, weights and their sums are exchanged through shared memory; of the values each has an eighth of the
// dimensions, so that the chain over positions stays in order. The next tile's scores are computed beside
// that chain. Spans that lie in different CTAs are added up in order by the last to arrive. Where there are
// more of them than CTAs fit the GPU, packed_attention_spans.cu has them.
//
// A cache of fp8 (kv_fp8.cuh) comes as it is, twice as many tiles ahead; codes become bf16 on the way to the
// products, scores and weights are multiplied with the scales.
//
// Roofline: 2 x dim x 2 bytes (fp8: 2 x dim + 2) per position and KV head / 4.3 TB/s. A tile takes a CTA some
// 500 cycles of latency, two CTAs to an SM, where its bytes take 1,750 (dim 64): short contexts are bound by
// latency, long ones by memory.
#include "kernels/cuda/attention/decode_producer.cuh"

#include <algorithm>
#include <type_traits>

namespace millrace::cuda {
namespace {

template <int kDim, bool kFp8>
class DecodeWalker {
  using Shape = DecodeShape<kDim, kFp8>;

 public:
  __device__ DecodeWalker(const PackedAttention& p, uint8_t* slots, int32_t num_slots,
                          DecodeShared<kDim, kFp8>& shared)
      : p_(p),
        slots_(slots),
        num_slots_(num_slots),
        shared_(shared),
        warp_(threadIdx.x / kWarpLanes),
        lane_(threadIdx.x % kWarpLanes),
        group_(p.cache.heads / p.cache.kv_heads) {}

  // Before anything of the step is read, the first item is known.
  __device__ void run() {
    const Items items(p_);
    Item item;
    bool waited = false;
    for (int32_t i = blockIdx.x; i < items.count; i += gridDim.x) {
      if (!items.at(i, item)) continue;
      sink_ = p_.op.sinks != nullptr && lane_ / 4 < group_
                  ? __ldg(p_.op.sinks + item.kv_head * group_ + lane_ / 4) * kLog2e
                  : 0.0f;
      const bool appends = p_.angles != nullptr && item.past_tile == item.sight.last / kKeyTile + 1 &&
                           warp_ == item.sight.last % kKeyTile / kBlockTokens;
      if (appends) block_ = item.table[item.sight.last / kBlockTokens];
      if (!waited) ptx::wait_for_previous();
      waited = true;
      ptx::barrier_wait(shared_.input_full + input_.slot, input_.phase);
      load_query();
      walk(item, appends);
      ptx::barrier_arrive(shared_.input_empty + input_.slot);
      input_ = input_.next(kInputs);
      if (item.span < 0) {
        store_out(item);
      } else {
        merge_if_last(item);
      }
    }
  }

 private:
  __device__ uint8_t* slot(Place at) const { return slots_ + at.slot * Shape::kSlotBytes; }
  __device__ void wait_full(Place at) const { ptx::barrier_wait(shared_.full + at.slot, at.phase); }
  // Every lane for itself: not slower than one for its warp, and an order that racecheck can follow.
  __device__ void release(Place at) const { ptx::barrier_arrive(shared_.empty + at.slot); }
  __device__ static void meet() { ptx::named_barrier<1, kMultiplyThreads>(); }

  __device__ void load_query() {
    const int g = lane_ / 4;
    const RowInput<kDim, kFp8>& input = shared_.inputs[input_.slot];
    query_.load(g < group_ ? input.query[g] : nullptr, p_.angles != nullptr ? input.added.turns : nullptr,
                p_.interleaved, p_.op.scale * kLog2e);
  }
  __device__ Append<kDim, kFp8> new_token(const Item& item) const {
    return {shared_.inputs[input_.slot].added, p_.interleaved, item.sight.last};
  }

  // Adds a tile's values to the sums of this warp's dimensions.
  __device__ __forceinline__ void add_values(const uint8_t* values) {
#pragma unroll
    for (int first = 0; first < kTilePages; first += 4) {
      uint2 weights[4];
      load_weights(shared_.weights, first, weights);
      add_pages<kDim, kFp8, kTilePages>(values, first, weights, warp_ * Shape::kWarpColumns, sum_);
    }
  }

  // Scores of a tile become weights in shared memory; returns what the sums so far are multiplied with.
  __device__ __forceinline__ float soften(const Item& item, int32_t tile, PageScores& score) {
    const int g = lane_ / 4, t = lane_ % 4;
    const int32_t from = tile * kKeyTile;
    if (from < item.sight.first || from + kKeyTile - 1 > item.sight.last) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t position = from + warp_ * kBlockTokens + i / 2 * 8 + 2 * t + i % 2;
        if (position < item.sight.first || position > item.sight.last) score.hide(i);
      }
    }
    const float most = quad_max(fmaxf(fmaxf(score.of[0], score.of[1]), fmaxf(score.of[2], score.of[3])));
    if (t == 0) shared_.tops[g][warp_] = most;
    meet();  // all pages' largest are there
    const float4 low = *reinterpret_cast<const float4*>(&shared_.tops[g][0]),
                 high = *reinterpret_cast<const float4*>(&shared_.tops[g][4]);
    const float tile_top = fmaxf(fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)),
                                 fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w)));
    const float new_top = fmaxf(top_, tile_top), base = base_of(new_top), by = exp2_of(top_ - base);
    top_ = new_top;
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = exp2_of(score.of[i] - base);
    shared_.sums[warp_][lane_] = (w[0] + w[1]) + (w[2] + w[3]);
    auto* to =
        reinterpret_cast<uint32_t*>(shared_.weights + g * kWeightRow + (warp_ * kBlockTokens + 2 * t) * 2);
#pragma unroll
    for (int i = 0; i < 4 && kFp8; ++i) w[i] *= score.value_scale(i);
    to[0] = pack_bf16(w[0], w[1]);
    to[4] = pack_bf16(w[2], w[3]);
    return by;
  }

  // `appends`: this warp has the page of the new token, in the last tile, whose slots it then keeps to the
  // end.
  __device__ void walk(const Item& item, bool appends) {
    total_ = SpanMerge{};
#pragma unroll
    for (int n = 0; n < Shape::kWarpColumns; ++n) total_sum_[n][0] = total_sum_[n][1] = 0.0f;
    begin_span();
    const int32_t last_tile = item.past_tile - 1;
    PageScores score;
    Place keys = place_;
    wait_full(keys);
    if (appends && item.first_tile == last_tile) new_token(item).template into_slot<false>(slot(keys));
    page_scores<kTilePages>(query_, slot(keys), warp_, score);
    if (!appends || item.first_tile != last_tile) release(keys);
    for (int32_t tile = item.first_tile; tile <= last_tile; ++tile) {
      const Place values = place_.next(num_slots_);
      const float by = soften(item, tile, score);
      const bool more = tile < last_tile;
      if (appends && !more) {
        wait_full(values);
        new_token(item).template into_slot<true>(slot(values));
      }
      meet();               // weights, their sums and the new value are there
      Place next = values;  // keys of the next tile; without one, scores of whatever, which nobody reads
      if (more) {
        next = keys = values.next(num_slots_);
        wait_full(keys);
        if (appends && tile + 1 == last_tile) new_token(item).template into_slot<false>(slot(keys));
      }
      wait_full(values);
      scale_sums(by);
      page_scores<kTilePages>(query_, slot(next), warp_, score);
      add_values(slot(values));
      if (more && (!appends || tile + 1 != last_tile)) release(keys);
      if (appends && !more) {
        new_token(item).template into_cache<false>(p_.cache, block_, item.kv_head, slot(keys));
        new_token(item).template into_cache<true>(p_.cache, block_, item.kv_head, slot(values));
        release(keys);
      }
      release(values);
      place_ = more ? keys : values.next(num_slots_);
      if (!more || (tile + 1) % kSpanTiles == 0) end_span(item);
    }
  }

  __device__ void begin_span() {
    top_ = -INFINITY;
    weight_ = 0.0f;
#pragma unroll
    for (int n = 0; n < Shape::kWarpColumns; ++n) {
      sum_[n][0] = sum_[n][1] = sum_[n][2] = sum_[n][3] = 0.0f;
    }
  }
  __device__ __forceinline__ void scale_sums(float by) {
    float w[kWarps];
#pragma unroll
    for (int i = 0; i < kWarps; ++i) w[i] = shared_.sums[i][lane_];
    weight_ = fmaf(weight_, by, ((w[0] + w[1]) + (w[2] + w[3])) + ((w[4] + w[5]) + (w[6] + w[7])));
#pragma unroll
    for (int n = 0; n < Shape::kWarpColumns; ++n) sum_[n][0] *= by, sum_[n][1] *= by;
  }

  __device__ float* partial_of(const Item& item, int32_t span) const {
    const int64_t place = item.row * p_.cache.kv_heads + item.kv_head;
    return p_.partial + (place * p_.max_spans + span) * Shape::kPartialFloats;
  }
  // Sums lie as the lanes have them.
  __device__ float2* sums_of(float* partial, int n) const {
    return reinterpret_cast<float2*>(partial) + (n * kWarps + warp_) * kWarpLanes + lane_;
  }
  __device__ void end_span(const Item& item) {
    const float weight = quad_sum(weight_);
    const int g = lane_ / 4;
    if (item.span < 0) {
      merge(top_, weight, [&](int n) { return float2{sum_[n][0], sum_[n][1]}; });
    } else {
      float* mine = partial_of(item, item.span);
#pragma unroll
      for (int n = 0; n < Shape::kWarpColumns; ++n) *sums_of(mine, n) = {sum_[n][0], sum_[n][1]};
      if (warp_ == 0 && lane_ % 4 == 0) {
        mine[kMaxHeadGroup * kDim + g] = top_;
        mine[kMaxHeadGroup * (kDim + 1) + g] = weight;
      }
    }
    begin_span();
  }
  template <class Sums>
  __device__ __forceinline__ void merge(float top, float weight, const Sums& sums) {
    add_sums(total_.add(top, weight), sums);
  }
  template <class Sums>
  __device__ __forceinline__ void add_span(SpanMerge::Factors by, float weight, const Sums& sums) {
    total_.weight = by.merge(total_.weight, weight);
    add_sums(by, sums);
  }
  template <class Sums>
  __device__ __forceinline__ void add_sums(SpanMerge::Factors by, const Sums& sums) {
#pragma unroll
    for (int n = 0; n < Shape::kWarpColumns; ++n) {
      const float2 other = sums(n);
      total_sum_[n][0] = by.merge(total_sum_[n][0], other.x);
      total_sum_[n][1] = by.merge(total_sum_[n][1], other.y);
    }
  }

  // Counts this CTA's span; true in the CTA that has the last of a row's, which then sees them all.
  __device__ bool last_to_arrive(const Item& item) {
    meet();  // everybody's part of the span is written
    if (threadIdx.x == 0) {
      int32_t* arrived = p_.arrived + item.row * p_.cache.kv_heads + item.kv_head;
      const bool last = ptx::count_in(arrived) == item.sight.spans() - 1;
      if (last) *arrived = 0;
      shared_.last = last ? 1 : 0;
    }
    meet();
    return shared_.last != 0;
  }

  // In order, but for the factors: a span's depend on the largest score before it alone, so that each is
  // computed by a thread of its own.
  __device__ void merge_if_last(const Item& item) {
    if (!last_to_arrive(item)) return;
    constexpr int kBatch = Shape::kBatch;
    const int32_t spans = item.sight.spans();
    const int g = lane_ / 4, mine = static_cast<int>(threadIdx.x) / kMaxHeadGroup,
              head = static_cast<int>(threadIdx.x) % kMaxHeadGroup;
    float top_before = -INFINITY;  // of `head`
    for (int32_t first = 0; first < spans; first += kBatch) {
      float2 sums[kBatch][Shape::kWarpColumns];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        float* from = partial_of(item, min(first + i, spans - 1));
#pragma unroll
        for (int n = 0; n < Shape::kWarpColumns; ++n) sums[i][n] = __ldcg(sums_of(from, n));
      }
      float weight = 0.0f;
      if (mine < kBatch) {
        const float* from = partial_of(item, min(first + mine, spans - 1)) + kMaxHeadGroup * kDim + head;
        shared_.span_tops[mine][head] = first + mine < spans ? __ldcg(from) : -INFINITY;
        weight = __ldcg(from + kMaxHeadGroup);
      }
      meet();                                          // all largest scores are there
      float before = -INFINITY, mine_top = -INFINITY;  // largest before span `mine`, and its own
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float top = shared_.span_tops[i][head];
        if (i == mine) before = top_before, mine_top = top;
        top_before = fmaxf(top_before, top);
      }
      if (mine < kBatch) {
        const float base = base_of(fmaxf(before, mine_top));
        shared_.merges[mine][head] = {exp2_of(before - base), exp2_of(mine_top - base), weight};
      }
      meet();  // and all factors
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= spans) break;
        const float3 m = shared_.merges[i][g];
        add_span({m.x, m.y}, m.z, [&](int n) { return sums[i][n]; });
      }
    }
    total_.top = __shfl_sync(kAllLanes, top_before, g);  // lane g has head g
    store_out(item);
  }

  __device__ void store_out(const Item& item) {
    const int g = lane_ / 4, t = lane_ % 4;
    if (g >= group_) return;
    const int head = item.kv_head * group_ + g;
    if (p_.op.sinks != nullptr) {
      merge(sink_, 1.0f, [](int) { return float2{0.0f, 0.0f}; });
    }
    const float share = 1.0f / total_.weight;
    float* out = p_.out + (item.row * p_.cache.heads + head) * kDim + 2 * t;
#pragma unroll
    for (int n = 0; n < Shape::kWarpColumns; ++n) {
      *reinterpret_cast<float2*>(out + (warp_ * Shape::kWarpColumns + n) * 8) = {total_sum_[n][0] * share,
                                                                                 total_sum_[n][1] * share};
    }
  }

  const PackedAttention& p_;
  uint8_t* slots_;
  int32_t num_slots_;
  DecodeShared<kDim, kFp8>& shared_;
  const int warp_, lane_, group_;
  Place place_, input_;  // of the next keys, and of the row
  int32_t block_ = 0;    // of the new token
  float sink_;           // of head g
  RowQuery<kDim, kFp8> query_;
  float top_, weight_;  // of head g, of the span; weight_ is this lane's share
  float sum_[Shape::kWarpColumns]
            [4];  // [n][0..1]: head g, dimensions 2t, 2t + 1 of column n; the rest is zero
  SpanMerge total_;
  float total_sum_[Shape::kWarpColumns][2];
};

template <int kDim, bool kFp8>
__global__ void __launch_bounds__(kThreads, 2)
    packed_attention_kernel(const __grid_constant__ PackedAttention p, int32_t num_slots) {
  extern __shared__ __align__(1024) uint8_t slots[];
  auto& shared =
      *reinterpret_cast<DecodeShared<kDim, kFp8>*>(slots + num_slots * DecodeShape<kDim, kFp8>::kSlotBytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < num_slots; ++i) {
      ptx::barrier_init(shared.full + i, 1);
      ptx::barrier_init(shared.empty + i, kMultiplyThreads);
    }
    for (int i = 0; i < kInputs; ++i) {
      ptx::barrier_init(shared.input_full + i, 1);
      ptx::barrier_init(shared.input_empty + i, kMultiplyThreads);
    }
    ptx::barrier_init_fence();
  }
  ptx::let_dependents_start();
  __syncthreads();  // the barriers are there
  const int warp = threadIdx.x / kWarpLanes;
  if (warp == kWarps) {
    // What earlier steps stored is there before the kernel ahead has ended.
    if (p.angles == nullptr) ptx::wait_for_previous();
    bring_items(p, slots, num_slots, shared);
  } else if (warp > kWarps) {
    ptx::wait_for_previous();
    bring_inputs(p, shared);
  } else {
    DecodeWalker<kDim, kFp8>(p, slots, num_slots, shared).run();
  }
}

template <int kDim, bool kFp8>
constexpr size_t shared_bytes(int32_t slots) {
  return static_cast<size_t>(slots) * DecodeShape<kDim, kFp8>::kSlotBytes + sizeof(DecodeShared<kDim, kFp8>);
}

template <int kDim, bool kFp8>
void launch_as(const PackedAttention& op, const Launch& at) {
  using Shape = DecodeShape<kDim, kFp8>;
  const int64_t items = int64_t{op.rows} * op.cache.kv_heads * (op.partial != nullptr ? op.max_spans : 1);
  const int64_t ctas = std::min<int64_t>(items, 2 * at.device.sm_count());
  const auto most = static_cast<int>(at.device.max_shared_memory() - sizeof(DecodeShared<kDim, kFp8>));
  int32_t slots = std::min(Shape::kSlots, most / Shape::kSlotBytes);
  const auto kernel = packed_attention_kernel<kDim, kFp8>;
  // As much as any launch needs: those of a graph differ, and the last word would be for all.
  allow_shared_memory(kernel, shared_bytes<kDim, kFp8>(slots));
  if (op.op.window > 0) slots = std::min(slots, 2 * ((op.op.window + kKeyTile - 2) / kKeyTile + 1));
  const size_t bytes = shared_bytes<kDim, kFp8>(slots);
  launch_dependent("packed_attention_kernel", kernel, dim3(static_cast<unsigned>(ctas)), kThreads, bytes, at,
                   op, slots);
}

}  // namespace

bool fits_packed_attention(DType kv_type, int32_t heads, int32_t kv_heads, int32_t head_dim,
                           const Device& device) {
  const size_t bytes = with_row_shape(kv_type, head_dim, [](auto dim, auto fp8) {
    return shared_bytes<dim(), fp8()>(DecodeShape<dim(), fp8()>::kSlots);
  });
  return (kv_type == DType::kBF16 || kv_type == DType::kF8E4M3) && (head_dim == 64 || head_dim == 128) &&
         kv_heads > 0 && heads % kv_heads == 0 && heads / kv_heads <= kMaxHeadGroup &&
         device.has_bulk_copies() && bytes <= device.max_shared_memory();
}

size_t packed_attention_partial_bytes(int64_t rows, int32_t max_spans, int32_t kv_heads, int32_t head_dim) {
  if (max_spans <= 1) return 0;
  return static_cast<size_t>(rows) * static_cast<size_t>(max_spans) * static_cast<size_t>(kv_heads) *
         kMaxHeadGroup * static_cast<size_t>(head_dim + 2) * sizeof(float);
}

void launch_packed_attention(const PackedAttention& op, const Launch& at) {
  if (op.rows == 0) return;
  if (op.num_chunks > 0 && op.angles == nullptr) return launch_prompt_attention(op, at);
  // More spans than CTAs fit the GPU: a warp each, then. Fewer are done sooner by all warps of a CTA.
  if (op.partial != nullptr &&
      int64_t{op.rows} * op.cache.kv_heads * op.max_spans > 2 * at.device.sm_count()) {
    return launch_packed_spans(op, at);
  }
  with_row_shape(op.cache.type, op.cache.head_dim,
                 [&](auto dim, auto fp8) { launch_as<dim(), fp8()>(op, at); });
}

}  // namespace millrace::cuda
