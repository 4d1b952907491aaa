// Decode attention over the paged cache on the tensor cores: single rows, all query heads of a KV head at
// once, so that keys and values are read once for the group. The numerics are those of paged_tile.cuh.
//
// A work item is one split of one row and KV head, or the whole row where there are enough of them; a
// persistent CTA loops over its items. One producer warp loads tiles of 128 positions by bulk copies, page by
// page, up to 96 KB ahead, in a step of single tokens before the previous kernel has ended; another loads
// queries, new keys and values, an item ahead. Of the eight consumer warps each has one page of 16 positions
// of a tile's scores; row_max, probabilities and their sums are exchanged through shared memory; of P V each
// has an eighth of the dimensions, so that the chain over positions stays in order. The next tile's scores
// are computed beside that chain. Splits of different CTAs are combined in order by the last to arrive. Where
// there are more splits than CTAs fit the GPU, decode_split_kv.cu has them.
//
// A cache of fp8 (kv_fp8.cuh) comes as it is, twice as many tiles ahead; codes become bf16 on the way to the
// products, scores and probabilities are multiplied with the scales.
//
// Roofline: 2 x dim x 2 bytes (fp8: 2 x dim + 2) per position and KV head / 4.3 TB/s. A tile takes a CTA some
// 500 cycles of latency, two CTAs to an SM, where its bytes take 1,750 (dim 64): short contexts are bound by
// latency, long ones by memory.
#include "kernels/cuda/attention/decode_producer.cuh"

#include <algorithm>
#include <type_traits>

namespace millrace::cuda {
namespace {

// A consumer warp: its page of each tile's Q K^T, its eighth of the dimensions of P V.
template <int kDim, bool kFp8>
class DecodeConsumer {
  using Shape = DecodeShape<kDim, kFp8>;

 public:
  __device__ DecodeConsumer(const PagedAttention& p, uint8_t* stages, int32_t num_stages,
                            DecodeShared<kDim, kFp8>& shared)
      : p_(p),
        stages_(stages),
        num_stages_(num_stages),
        shared_(shared),
        warp_(threadIdx.x / kWarpLanes),
        lane_(threadIdx.x % kWarpLanes),
        group_(p.cache.heads / p.cache.kv_heads) {}

  // The first item is known before anything of the step is read.
  __device__ void run() {
    const DecodeItems items(p_);
    DecodeItem item;
    bool waited = false;
    for (int32_t i = blockIdx.x; i < items.count; i += gridDim.x) {
      if (!items.at(i, item)) continue;
      sink_ = p_.op.sinks != nullptr && lane_ / 4 < group_
                  ? __ldg(p_.op.sinks + item.kv_head * group_ + lane_ / 4) * kLog2e
                  : 0.0f;
      const bool appends = p_.angles != nullptr && item.past_tile == item.visible.last / kKeyTile + 1 &&
                           warp_ == item.visible.last % kKeyTile / kBlockTokens;
      if (appends) block_ = item.table[item.visible.last / kBlockTokens];
      if (!waited) ptx::wait_for_previous();
      waited = true;
      ptx::barrier_wait(shared_.input_full + input_.stage, input_.phase);
      load_query();
      mainloop(item, appends);
      ptx::barrier_arrive(shared_.input_empty + input_.stage);
      input_ = input_.next(kInputs);
      if (item.split < 0) {
        store_out(item);
      } else {
        combine_if_last(item);
      }
    }
  }

 private:
  __device__ uint8_t* stage(RingPosition at) const { return stages_ + at.stage * Shape::kStageBytes; }
  __device__ void wait_full(RingPosition at) const { ptx::barrier_wait(shared_.full + at.stage, at.phase); }
  // Every lane for itself: not slower than one for its warp, and an order that racecheck can follow.
  __device__ void release(RingPosition at) const { ptx::barrier_arrive(shared_.empty + at.stage); }
  __device__ static void sync() { ptx::named_barrier<1, kDecodeConsumerThreads>(); }

  __device__ void load_query() {
    const int g = lane_ / 4;
    const RowInput<kDim, kFp8>& input = shared_.inputs[input_.stage];
    query_.load(g < group_ ? input.query[g] : nullptr, p_.angles != nullptr ? input.added.cos_sin : nullptr,
                p_.interleaved, p_.op.scale * kLog2e);
  }
  __device__ Append<kDim, kFp8> new_token(const DecodeItem& item) const {
    return {shared_.inputs[input_.stage].added, p_.interleaved, item.visible.last};
  }

  // acc += P V of a tile, for this warp's dimensions.
  __device__ __forceinline__ void multiply_pv(const uint8_t* values) {
#pragma unroll
    for (int first = 0; first < kTilePages; first += 4) {
      uint2 probs[4];
      load_probs(shared_.probs, first, probs);
      multiply_pv_pages<kDim, kFp8, kTilePages>(values, first, probs, warp_ * Shape::kWarpColumns, acc_);
    }
  }

  // Scores of a tile become probabilities in shared memory; returns by what accumulators and row_sum are
  // rescaled.
  __device__ __forceinline__ float softmax(const DecodeItem& item, int32_t tile, PageScores& score) {
    const int g = lane_ / 4, t = lane_ % 4;
    const int32_t from = tile * kKeyTile;
    if (from < item.visible.first || from + kKeyTile - 1 > item.visible.last) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t position = from + warp_ * kBlockTokens + i / 2 * 8 + 2 * t + i % 2;
        if (position < item.visible.first || position > item.visible.last) score.mask(i);
      }
    }
    const float score_max = quad_max(fmaxf(fmaxf(score.of[0], score.of[1]), fmaxf(score.of[2], score.of[3])));
    if (t == 0) shared_.row_max[g][warp_] = score_max;
    sync();  // the row_max of all pages are there
    const float4 low = *reinterpret_cast<const float4*>(&shared_.row_max[g][0]),
                 high = *reinterpret_cast<const float4*>(&shared_.row_max[g][4]);
    const float tile_max = fmaxf(fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)),
                                 fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w)));
    const float new_max = fmaxf(row_max_, tile_max), base = softmax_base(new_max),
                alpha = ptx::exp2_approx(row_max_ - base);
    row_max_ = new_max;
    float prob[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) prob[i] = ptx::exp2_approx(score.of[i] - base);
    shared_.page_sums[warp_][lane_] = (prob[0] + prob[1]) + (prob[2] + prob[3]);
    auto* to =
        reinterpret_cast<uint32_t*>(shared_.probs + g * kProbRowBytes + (warp_ * kBlockTokens + 2 * t) * 2);
#pragma unroll
    for (int i = 0; i < 4 && kFp8; ++i) prob[i] *= score.value_scale(i);
    to[0] = pack_bf16(prob[0], prob[1]);
    to[4] = pack_bf16(prob[2], prob[3]);
    return alpha;
  }

  // `appends`: this warp has the page of the new token, in the last tile, whose stages it then keeps to the
  // end.
  __device__ void mainloop(const DecodeItem& item, bool appends) {
    combined_ = SplitCombine{};
#pragma unroll
    for (int n = 0; n < Shape::kWarpColumns; ++n) out_[n][0] = out_[n][1] = 0.0f;
    begin_split();
    const int32_t last_tile = item.past_tile - 1;
    PageScores score;
    RingPosition keys = at_;
    wait_full(keys);
    if (appends && item.first_tile == last_tile) new_token(item).template into_stage<false>(stage(keys));
    multiply_qk_page<kTilePages>(query_, stage(keys), warp_, score);
    if (!appends || item.first_tile != last_tile) release(keys);
    for (int32_t tile = item.first_tile; tile <= last_tile; ++tile) {
      const RingPosition values = at_.next(num_stages_);
      const float alpha = softmax(item, tile, score);
      const bool more = tile < last_tile;
      if (appends && !more) {
        wait_full(values);
        new_token(item).template into_stage<true>(stage(values));
      }
      sync();  // all warps' probabilities, their sums and the new value are there
      RingPosition next =
          values;  // keys of the next tile; without one, scores of whatever, which nobody reads
      if (more) {
        next = keys = values.next(num_stages_);
        wait_full(keys);
        if (appends && tile + 1 == last_tile) new_token(item).template into_stage<false>(stage(keys));
      }
      wait_full(values);
      rescale(alpha);
      multiply_qk_page<kTilePages>(query_, stage(next), warp_, score);
      multiply_pv(stage(values));
      if (more && (!appends || tile + 1 != last_tile)) release(keys);
      if (appends && !more) {
        new_token(item).template into_cache<false>(p_.cache, block_, item.kv_head, stage(keys));
        new_token(item).template into_cache<true>(p_.cache, block_, item.kv_head, stage(values));
        release(keys);
      }
      release(values);
      at_ = more ? keys : values.next(num_stages_);
      if (!more || (tile + 1) % kSplitTiles == 0) end_split(item);
    }
  }

  __device__ void begin_split() {
    row_max_ = -INFINITY;
    row_sum_ = 0.0f;
#pragma unroll
    for (int n = 0; n < Shape::kWarpColumns; ++n) {
      acc_[n][0] = acc_[n][1] = acc_[n][2] = acc_[n][3] = 0.0f;
    }
  }
  __device__ __forceinline__ void rescale(float alpha) {
    float sums[kDecodeConsumerWarps];
#pragma unroll
    for (int i = 0; i < kDecodeConsumerWarps; ++i) sums[i] = shared_.page_sums[i][lane_];
    row_sum_ =
        fmaf(row_sum_, alpha,
             ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7])));
#pragma unroll
    for (int n = 0; n < Shape::kWarpColumns; ++n) acc_[n][0] *= alpha, acc_[n][1] *= alpha;
  }

  __device__ float* partial(const DecodeItem& item, int32_t split) const {
    const int64_t row_and_head = item.row * p_.cache.kv_heads + item.kv_head;
    return p_.partial + (row_and_head * p_.max_splits + split) * Shape::kPartialFloats;
  }
  // Accumulators lie as the lanes have them.
  __device__ float2* partial_acc(float* partial, int n) const {
    return reinterpret_cast<float2*>(partial) + (n * kDecodeConsumerWarps + warp_) * kWarpLanes + lane_;
  }
  __device__ void end_split(const DecodeItem& item) {
    const float row_sum = quad_sum(row_sum_);
    const int g = lane_ / 4;
    if (item.split < 0) {
      combine(row_max_, row_sum, [&](int n) { return float2{acc_[n][0], acc_[n][1]}; });
    } else {
      float* mine = partial(item, item.split);
#pragma unroll
      for (int n = 0; n < Shape::kWarpColumns; ++n) *partial_acc(mine, n) = {acc_[n][0], acc_[n][1]};
      if (warp_ == 0 && lane_ % 4 == 0) {
        mine[kMaxHeadGroup * kDim + g] = row_max_;
        mine[kMaxHeadGroup * (kDim + 1) + g] = row_sum;
      }
    }
    begin_split();
  }
  template <class Sums>
  __device__ __forceinline__ void combine(float row_max, float row_sum, const Sums& sums) {
    add_accumulators(combined_.add(row_max, row_sum), sums);
  }
  template <class Sums>
  __device__ __forceinline__ void add_split(SplitCombine::Factors factors, float row_sum, const Sums& sums) {
    combined_.row_sum = factors.combine(combined_.row_sum, row_sum);
    add_accumulators(factors, sums);
  }
  template <class Sums>
  __device__ __forceinline__ void add_accumulators(SplitCombine::Factors factors, const Sums& sums) {
#pragma unroll
    for (int n = 0; n < Shape::kWarpColumns; ++n) {
      const float2 other = sums(n);
      out_[n][0] = factors.combine(out_[n][0], other.x);
      out_[n][1] = factors.combine(out_[n][1], other.y);
    }
  }

  // Counts this CTA's split; true in the CTA that has the last of a row's, which then sees them all.
  __device__ bool last_to_arrive(const DecodeItem& item) {
    sync();  // everybody's part of the split is written
    if (threadIdx.x == 0) {
      int32_t* arrived = p_.arrived + item.row * p_.cache.kv_heads + item.kv_head;
      const bool last = ptx::count_in(arrived) == item.visible.splits() - 1;
      if (last) *arrived = 0;
      shared_.last = last ? 1 : 0;
    }
    sync();  // everybody learns of it from thread 0
    return shared_.last != 0;
  }

  // In order, but for the factors: a split's depend on the row_max before it alone, so that each is
  // computed by a thread of its own.
  __device__ void combine_if_last(const DecodeItem& item) {
    if (!last_to_arrive(item)) return;
    constexpr int kCombineBatch = Shape::kCombineBatch;
    const int32_t splits = item.visible.splits();
    const int g = lane_ / 4, mine = static_cast<int>(threadIdx.x) / kMaxHeadGroup,
              head = static_cast<int>(threadIdx.x) % kMaxHeadGroup;
    float max_before = -INFINITY;  // of `head`
    for (int32_t first = 0; first < splits; first += kCombineBatch) {
      float2 sums[kCombineBatch][Shape::kWarpColumns];
#pragma unroll
      for (int i = 0; i < kCombineBatch; ++i) {
        float* from = partial(item, min(first + i, splits - 1));
#pragma unroll
        for (int n = 0; n < Shape::kWarpColumns; ++n) sums[i][n] = __ldcg(partial_acc(from, n));
      }
      float row_sum = 0.0f;
      if (mine < kCombineBatch) {
        const float* from = partial(item, min(first + mine, splits - 1)) + kMaxHeadGroup * kDim + head;
        shared_.split_max[mine][head] = first + mine < splits ? __ldcg(from) : -INFINITY;
        row_sum = __ldcg(from + kMaxHeadGroup);
      }
      sync();                                           // the row_max of all splits of the batch are there
      float before = -INFINITY, split_max = -INFINITY;  // row_max before split `mine`, and its own
#pragma unroll
      for (int i = 0; i < kCombineBatch; ++i) {
        const float its_max = shared_.split_max[i][head];
        if (i == mine) before = max_before, split_max = its_max;
        max_before = fmaxf(max_before, its_max);
      }
      if (mine < kCombineBatch) {
        const float base = softmax_base(fmaxf(before, split_max));
        shared_.factors[mine][head] = {ptx::exp2_approx(before - base), ptx::exp2_approx(split_max - base),
                                       row_sum};
      }
      sync();  // all factors are there
#pragma unroll
      for (int i = 0; i < kCombineBatch; ++i) {
        if (first + i >= splits) break;
        const float3 m = shared_.factors[i][g];
        add_split({m.x, m.y}, m.z, [&](int n) { return sums[i][n]; });
      }
    }
    combined_.row_max = __shfl_sync(kAllLanes, max_before, g);  // lane g has head g
    store_out(item);
  }

  __device__ void store_out(const DecodeItem& item) {
    const int g = lane_ / 4, t = lane_ % 4;
    if (g >= group_) return;
    const int head = item.kv_head * group_ + g;
    if (p_.op.sinks != nullptr) {
      combine(sink_, 1.0f, [](int) { return float2{0.0f, 0.0f}; });
    }
    const float inv_row_sum = 1.0f / combined_.row_sum;
    float* out = p_.out + (item.row * p_.cache.heads + head) * kDim + 2 * t;
#pragma unroll
    for (int n = 0; n < Shape::kWarpColumns; ++n) {
      *reinterpret_cast<float2*>(out + (warp_ * Shape::kWarpColumns + n) * 8) = {out_[n][0] * inv_row_sum,
                                                                                 out_[n][1] * inv_row_sum};
    }
  }

  const PagedAttention& p_;
  uint8_t* stages_;
  int32_t num_stages_;
  DecodeShared<kDim, kFp8>& shared_;
  const int warp_, lane_, group_;
  RingPosition at_, input_;  // stages of the next keys, and of the row's inputs
  int32_t block_ = 0;        // of the new token
  float sink_;               // of head g
  RowQuery<kDim, kFp8> query_;
  float row_max_, row_sum_;  // of head g, of the split; row_sum_ is this lane's part
  // Of the split. [n][0..1]: head g, dimensions 2t, 2t + 1 of column n; the rest is zero.
  float acc_[Shape::kWarpColumns][4];
  SplitCombine combined_;  // the splits before, and their accumulators
  float out_[Shape::kWarpColumns][2];
};

template <int kDim, bool kFp8>
__global__ void __launch_bounds__(kDecodeThreads, 2)
    decode_attention_kernel(const __grid_constant__ PagedAttention p, int32_t num_stages) {
  extern __shared__ __align__(1024) uint8_t stages[];
  auto& shared = *reinterpret_cast<DecodeShared<kDim, kFp8>*>(
      stages + num_stages * DecodeShape<kDim, kFp8>::kStageBytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < num_stages; ++i) {
      ptx::barrier_init(shared.full + i, 1);
      ptx::barrier_init(shared.empty + i, kDecodeConsumerThreads);
    }
    for (int i = 0; i < kInputs; ++i) {
      ptx::barrier_init(shared.input_full + i, 1);
      ptx::barrier_init(shared.input_empty + i, kDecodeConsumerThreads);
    }
    ptx::barrier_init_fence();
  }
  ptx::let_dependents_start();
  __syncthreads();                                               // everybody: the barriers are there
  if (p.cache.head_tables != nullptr) ptx::wait_for_previous();  // before any item is looked at
  const int warp = threadIdx.x / kWarpLanes;
  if (warp == kDecodeConsumerWarps) {
    // What earlier steps stored is there before the previous kernel has ended.
    if (p.angles == nullptr) ptx::wait_for_previous();
    produce_kv(p, stages, num_stages, shared);
  } else if (warp > kDecodeConsumerWarps) {
    produce_inputs(p, shared);
  } else {
    DecodeConsumer<kDim, kFp8>(p, stages, num_stages, shared).run();
  }
}

template <int kDim, bool kFp8>
constexpr size_t shared_bytes(int32_t stages) {
  return static_cast<size_t>(stages) * DecodeShape<kDim, kFp8>::kStageBytes +
         sizeof(DecodeShared<kDim, kFp8>);
}

template <int kDim, bool kFp8>
void launch_as(const PagedAttention& op, const Launch& at) {
  using Shape = DecodeShape<kDim, kFp8>;
  const int64_t items = int64_t{op.rows} * op.cache.kv_heads * (op.partial != nullptr ? op.max_splits : 1);
  // In a step of single tokens at least one to every SM, most of them idle, as the other kernels of a step
  // have: 1% faster for experts (docs/log/2026-11-18-dense-decode.md).
  const int64_t least = op.angles != nullptr ? at.device.sm_count() : 1;
  const int64_t ctas = std::clamp<int64_t>(items, least, 2 * at.device.sm_count());
  const auto most = static_cast<int>(at.device.max_shared_memory() - sizeof(DecodeShared<kDim, kFp8>));
  int32_t stages = std::min(Shape::kStages, most / Shape::kStageBytes);
  const auto kernel = decode_attention_kernel<kDim, kFp8>;
  // As much as any launch needs: those of a graph differ, and the last word would be for all.
  allow_shared_memory(kernel, alone_on_sm(shared_bytes<kDim, kFp8>(stages), at.device));
  if (op.op.window > 0) stages = std::min(stages, 2 * ((op.op.window + kKeyTile - 2) / kKeyTile + 1));
  size_t bytes = shared_bytes<kDim, kFp8>(stages);
  if (ctas <= at.device.sm_count()) bytes = alone_on_sm(bytes, at.device);
  launch_dependent("decode_attention_kernel", kernel, dim3(static_cast<unsigned>(ctas)), kDecodeThreads,
                   bytes, at, op, stages);
}

}  // namespace

bool supports_paged_attention(DType kv_type, int32_t heads, int32_t kv_heads, int32_t head_dim,
                              const Device& device) {
  const size_t bytes = with_decode_shape(kv_type, head_dim, [](auto dim, auto fp8) {
    return shared_bytes<dim(), fp8()>(DecodeShape<dim(), fp8()>::kStages);
  });
  return (kv_type == DType::kBF16 || kv_type == DType::kF8E4M3) && (head_dim == 64 || head_dim == 128) &&
         kv_heads > 0 && heads % kv_heads == 0 && heads / kv_heads <= kMaxHeadGroup &&
         device.has_bulk_copies() && bytes <= device.max_shared_memory();
}

size_t paged_attention_partial_bytes(int64_t rows, int32_t max_splits, int32_t kv_heads, int32_t head_dim) {
  if (max_splits <= 1) return 0;
  return static_cast<size_t>(rows) * static_cast<size_t>(max_splits) * static_cast<size_t>(kv_heads) *
         kMaxHeadGroup * static_cast<size_t>(head_dim + 2) * sizeof(float);
}

void launch_paged_attention(const PagedAttention& op, const Launch& at) {
  if (op.num_chunks > 0 && op.angles == nullptr && op.rows > 0) return launch_prefill_attention(op, at);
  launch_decode_attention(op, at);
}

void launch_decode_attention(const PagedAttention& op, const Launch& at) {
  if (op.rows == 0) return;
  // More splits than CTAs fit the GPU: a warp each, then. Fewer take less time with all warps of a CTA.
  if (op.partial != nullptr &&
      int64_t{op.rows} * op.cache.kv_heads * op.max_splits > 2 * at.device.sm_count()) {
    return launch_decode_split_kv(op, at);
  }
  with_decode_shape(op.cache.type, op.cache.head_dim,
                    [&](auto dim, auto fp8) { launch_as<dim(), fp8()>(op, at); });
}

}  // namespace millrace::cuda
