// Decode attention with split-KV, where there are more splits than CTAs fit the GPU: long contexts. The
// numerics are those of paged_tile.cuh.
//
// A work item is one split of one row and KV head, up to four tiles of 128 positions, and one consumer warp
// has it alone: scores of a tile, their softmax within quads of lanes, probabilities straight from the
// scores' registers into P V. So nothing is exchanged and nobody waits, but for memory. A persistent CTA has
// two consumer warps and a producer warp for each, which loads halves of tiles, in a step of single tokens
// before the previous kernel has ended; two CTAs fit an SM. A split's row_max, row_sum and accumulators go to
// memory; the CTA that has the last of a row's splits combines them in order, with all of its warps, through
// the ring, which is free by then.
//
// Roofline: 2 x dim x 2 bytes (fp8: 2 x dim + 2) per position and KV head / 4.3 TB/s: 1 us for a tile in each
// SM (dim 64), 1.3 us is what a tile takes one of its four consumer warps. Ring and registers leave space
// beside a GEMV (gemv/dense.cu), which this kernel follows: a quarter of an SM has registers for four of its
// warps and one of 255.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/attention/decode_row.cuh"

namespace millrace::cuda {
namespace {

constexpr int kConsumerWarps = 2, kSplitKvWarps = 2 * kConsumerWarps,
              kSplitKvThreads = kSplitKvWarps * kWarpLanes;
constexpr int kTileHalves = 2, kHalfPages = kTilePages / kTileHalves;  // of a tile
constexpr int kCombineStages = 4;

template <int kDim, bool kFp8>
struct SplitShape : DecodeRowShape<kDim, kFp8, kHalfPages> {
  using Row = DecodeRowShape<kDim, kFp8, kHalfPages>;
  static constexpr int kRingBytes = (kDim == 64 ? 80 : 96) * 1024;
  static constexpr int kStages = kRingBytes / kConsumerWarps / Row::kStageBytes;  // of a consumer
  static constexpr int kWarpColumns = Row::kColumns / kSplitKvWarps;  // of a warp, when splits are combined
  static constexpr int kPartialBytes = Row::kPartialFloats * static_cast<int>(sizeof(float));
  static constexpr int kStageSplits =
      kRingBytes / kCombineStages / kPartialBytes;  // in a stage, when they are combined
};

template <int kDim, bool kFp8>
struct SplitShared {  // behind the rings, one of each consumer
  using Shape = SplitShape<kDim, kFp8>;
  struct Consumer {
    NewRow<kDim> added;
    uint64_t full[Shape::kStages], empty[Shape::kStages];
  } consumers[kConsumerWarps];
  uint64_t combine_full[kCombineStages];
  uint32_t last_of_row;  // bits of the CTA's items that were their row's last to arrive
};

// The items of a consumer: every kConsumerWarps-th of the CTA's.
struct SplitItems : DecodeItems {
  int32_t at_, stride;
  __device__ SplitItems(const PagedAttention& p, int consumer)
      : DecodeItems(p),
        at_(static_cast<int32_t>(blockIdx.x + gridDim.x * static_cast<uint32_t>(consumer))),
        stride(static_cast<int32_t>(gridDim.x) * kConsumerWarps) {}
  __device__ bool next(DecodeItem& item) {
    for (; at_ < count; at_ += stride) {
      if (!at(at_, item)) continue;
      at_ += stride;
      return true;
    }
    return false;
  }
};

// A consumer's producer, one warp: of each tile the keys, then the values. It waits for `empty`, on which the
// consumer's lanes arrive, and its copies complete `full`. With angles, the row's own are not in the cache
// yet.
template <int kDim, bool kFp8>
__device__ void produce_splits(const PagedAttention& p, int consumer, uint8_t* stages,
                               SplitShared<kDim, kFp8>& shared) {
  using Shape = SplitShape<kDim, kFp8>;
  static_assert(kSplitKeys == kWarpLanes * kBlockTokens);  // a lane has one page of a split
  const int lane = threadIdx.x % kWarpLanes;
  auto& barriers = shared.consumers[consumer];
  SplitItems items(p, consumer);
  RingPosition at;
  DecodeItem item;
  while (items.next(item)) {
    const TileSource source{p.cache, item.table, item.kv_head, item.visible.first / kBlockTokens,
                            item.visible.last + (p.angles == nullptr ? 1 : 0)};
    const int32_t split_block = block_of_page(source, item.first_tile / kSplitTiles * kWarpLanes + lane);
    const int32_t halves = (item.past_tile - item.first_tile) * 2 * kTileHalves;
    for (int32_t i = 0; i < halves; ++i) {
      const int32_t first =
          item.first_tile * kTilePages + (i / (2 * kTileHalves) * kTileHalves + i % kTileHalves) * kHalfPages;
      const int32_t block = __shfl_sync(kAllLanes, split_block, (first + lane % kHalfPages) % kWarpLanes);
      ptx::barrier_wait(barriers.empty + at.stage, at.phase ^ 1u);
      uint8_t* stage = stages + at.stage * Shape::kStageBytes;
      uint64_t* full = barriers.full + at.stage;
      const auto load = [&](auto values) {
        if constexpr (kFp8) {
          load_fp8_pages<kDim, values(), kHalfPages>(source, block, stage, full);
        } else {
          load_pages<kDim, values(), kHalfPages>(source, first, block, stage, full);
        }
      };
      if (i % (2 * kTileHalves) < kTileHalves) {
        load(std::false_type{});
      } else {
        load(std::true_type{});
      }
      at = at.next(Shape::kStages);
    }
  }
}

template <int kDim, bool kFp8>
__device__ float* partial_at(const PagedAttention& p, const DecodeItem& item, int32_t split) {
  const int64_t row_and_head = item.row * p.cache.kv_heads + item.kv_head;
  return p.partial + (row_and_head * p.max_splits + split) * SplitShape<kDim, kFp8>::kPartialFloats;
}

// A consumer warp: its splits from scores to partial results.
template <int kDim, bool kFp8>
class SplitConsumer {
  using Shape = SplitShape<kDim, kFp8>;

 public:
  __device__ SplitConsumer(const PagedAttention& p, int consumer, uint8_t* stages,
                           SplitShared<kDim, kFp8>& shared)
      : p_(p),
        items_(p, consumer),
        stages_(stages),
        shared_(shared.consumers[consumer]),
        lane_(threadIdx.x % kWarpLanes),
        group_(p.cache.heads / p.cache.kv_heads) {}

  __device__ void run() {
    DecodeItem item;
    while (items_.next(item)) {
      mainloop(item);
      store_partial(item);
    }
  }

 private:
  __device__ uint8_t* stage() const { return stages_ + at_.stage * Shape::kStageBytes; }
  __device__ void wait_full() const { ptx::barrier_wait(shared_.full + at_.stage, at_.phase); }
  // Every lane for itself, an order that racecheck can follow.
  __device__ void release() {
    ptx::barrier_arrive(shared_.empty + at_.stage);
    at_ = at_.next(Shape::kStages);
  }

  __device__ void load_row(const DecodeItem& item, bool appends) {
    const int g = lane_ / 4;
    const float* query = p_.query + (item.row * p_.cache.heads + item.kv_head * group_ + g) * kDim;
    const float2* cos_sin = p_.angles != nullptr ? p_.angles + item.row * (kDim / 2) : nullptr;
    query_.load(g < group_ ? query : nullptr, cos_sin, p_.interleaved, p_.op.scale * kLog2e);
    if (!appends) return;
    const int64_t kv_row = (item.row * p_.cache.kv_heads + item.kv_head) * kDim;
    for (int i = lane_; i < kDim / 2; i += kWarpLanes) {
      reinterpret_cast<float2*>(shared_.added.key)[i] = reinterpret_cast<const float2*>(p_.key + kv_row)[i];
      reinterpret_cast<float2*>(shared_.added.value)[i] =
          reinterpret_cast<const float2*>(p_.value + kv_row)[i];
      shared_.added.cos_sin[i] = cos_sin[i];
    }
    __syncwarp();
  }

  __device__ void mainloop(const DecodeItem& item) {
    const bool appends = p_.angles != nullptr && item.visible.last / kKeyTile == item.past_tile - 1;
    const int32_t block = appends ? item.table[item.visible.last / kBlockTokens] : 0;
    load_row(item, appends);
    const Append<kDim, kFp8, kHalfPages> append{shared_.added, p_.interleaved, item.visible.last};
    row_max_ = -INFINITY, row_sum_ = 0.0f;
#pragma unroll
    for (int n = 0; n < Shape::kColumns; ++n) acc_[n][0] = acc_[n][1] = acc_[n][2] = acc_[n][3] = 0.0f;
    for (int32_t tile = item.first_tile; tile < item.past_tile; ++tile) {
      // The half that the new token is in, if it is one of this tile's.
      const int appended = appends && tile == item.past_tile - 1
                               ? item.visible.last % kKeyTile / (kHalfPages * kBlockTokens)
                               : -1;
      PageScores scores[kTileHalves][kHalfPages];
#pragma unroll
      for (int half = 0; half < kTileHalves; ++half) {
        wait_full();
        if (half == appended) append.template into_stage<false>(stage());
#pragma unroll
        for (int page = 0; page < kHalfPages; ++page) {
          multiply_qk_page<kHalfPages>(query_, stage(), page, scores[half][page]);
        }
        if (half == appended) append.template into_cache<false>(p_.cache, block, item.kv_head, stage());
        release();
      }
      softmax(item, tile, scores);
#pragma unroll
      for (int half = 0; half < kTileHalves; ++half) {
        wait_full();
        if (half == appended) append.template into_stage<true>(stage());
        multiply_pv_pages<kDim, kFp8, kHalfPages>(stage(), 0, probs_[half], 0, acc_);
        if (half == appended) append.template into_cache<true>(p_.cache, block, item.kv_head, stage());
        release();
      }
    }
  }

  // Scores of a tile become probabilities; accumulators and row_sum are rescaled.
  __device__ __forceinline__ void softmax(const DecodeItem& item, int32_t tile,
                                          PageScores (&scores)[kTileHalves][kHalfPages]) {
    const auto page_of = [&](int i) -> PageScores& { return scores[i / kHalfPages][i % kHalfPages]; };
    const int t = lane_ % 4;
    const int32_t from = tile * kKeyTile;
    if (from < item.visible.first || from + kKeyTile - 1 > item.visible.last) {
#pragma unroll
      for (int i = 0; i < 4 * kTilePages; ++i) {
        const int32_t position = from + i / 4 * kBlockTokens + i % 4 / 2 * 8 + 2 * t + i % 2;
        if (position < item.visible.first || position > item.visible.last) page_of(i / 4).mask(i % 4);
      }
    }
    float tile_max = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4 * kTilePages; ++i) tile_max = fmaxf(tile_max, page_of(i / 4).of[i % 4]);
    const float new_max = fmaxf(row_max_, quad_max(tile_max)), base = softmax_base(new_max),
                alpha = ptx::exp2_approx(row_max_ - base);
    row_max_ = new_max;
    float sums[kTilePages];
#pragma unroll
    for (int page = 0; page < kTilePages; ++page) {
      float prob[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) prob[i] = ptx::exp2_approx(page_of(page).of[i] - base);
      sums[page] = (prob[0] + prob[1]) + (prob[2] + prob[3]);
#pragma unroll
      for (int i = 0; i < 4 && kFp8; ++i) prob[i] *= page_of(page).value_scale(i);
      probs_[page / kHalfPages][page % kHalfPages] = {pack_bf16(prob[0], prob[1]),
                                                      pack_bf16(prob[2], prob[3])};
    }
    row_sum_ =
        fmaf(row_sum_, alpha,
             ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7])));
#pragma unroll
    for (int n = 0; n < Shape::kColumns; ++n) acc_[n][0] *= alpha, acc_[n][1] *= alpha;
  }

  // Accumulators lie as the lanes have them.
  __device__ void store_partial(const DecodeItem& item) const {
    const float row_sum = quad_sum(row_sum_);
    float* partial = partial_at<kDim, kFp8>(p_, item, max(item.split, 0));
#pragma unroll
    for (int n = 0; n < Shape::kColumns; ++n) {
      reinterpret_cast<float2*>(partial)[n * kWarpLanes + lane_] = {acc_[n][0], acc_[n][1]};
    }
    if (lane_ % 4 == 0) {
      partial[kMaxHeadGroup * kDim + lane_ / 4] = row_max_;
      partial[kMaxHeadGroup * (kDim + 1) + lane_ / 4] = row_sum;
    }
  }

  const PagedAttention& p_;
  SplitItems items_;
  uint8_t* const stages_;
  typename SplitShared<kDim, kFp8>::Consumer& shared_;
  const int lane_, group_;
  RingPosition at_;
  RowQuery<kDim, kFp8> query_;
  static_assert(kHalfPages == 4);
  uint2 probs_[kTileHalves][4];    // of the tile's pages
  float row_max_, row_sum_;        // of head g, of the split; row_sum_ is this lane's part
  float acc_[Shape::kColumns][4];  // [n][0..1]: head g, dimensions 2t, 2t + 1 of column n; the rest is zero
};

// Combines the splits of rows that are complete: each warp has its columns. Splits come by bulk copies, some
// in each stage.
template <int kDim, bool kFp8>
class SplitCombiner {
  using Shape = SplitShape<kDim, kFp8>;
  static constexpr int kWarpColumns = Shape::kWarpColumns, kSplits = Shape::kStageSplits;

 public:
  __device__ SplitCombiner(const PagedAttention& p, uint8_t* ring, uint64_t* full)
      : p_(p), ring_(ring), full_(full), warp_(threadIdx.x / kWarpLanes), lane_(threadIdx.x % kWarpLanes) {}

  __device__ void run(const DecodeItem& item) {
    const int g = lane_ / 4, group = p_.cache.heads / p_.cache.kv_heads, head = item.kv_head * group + g;
    const bool sinks = p_.op.sinks != nullptr && g < group;
    const float sink = sinks ? __ldg(p_.op.sinks + head) * kLog2e : 0.0f;
    const int32_t splits = item.visible.splits(), chunks = (splits + kSplits - 1) / kSplits;
    for (int32_t chunk = 0; chunk < min(chunks, kCombineStages); ++chunk) load(item, chunk);
    combined_ = {};
#pragma unroll
    for (int n = 0; n < kWarpColumns; ++n) acc_[n] = {0.0f, 0.0f};
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      const int32_t n = combined_stages_ + chunk, count = splits - chunk * kSplits;
      ptx::barrier_wait(full_ + n % kCombineStages, static_cast<uint32_t>(n / kCombineStages) & 1u);
      const auto* from = reinterpret_cast<const float*>(stage(n));
      if (count >= kSplits) {  // their loads and exponentials overlap
#pragma unroll
        for (int i = 0; i < kSplits; ++i) combine_split(from + i * Shape::kPartialFloats);
      } else {
#pragma unroll 1
        for (int i = 0; i < count; ++i) combine_split(from + i * Shape::kPartialFloats);
      }
      __syncthreads();  // everybody has read the stage, before thread 0 loads it again
      if (chunk + kCombineStages < chunks) load(item, chunk + kCombineStages);
    }
    combined_stages_ += chunks;
    if (g >= group) return;
    if (sinks) add(sink, 1.0f, [](int) { return float2{0.0f, 0.0f}; });
    const float inv_row_sum = 1.0f / combined_.row_sum;
    float* out = p_.out + (item.row * p_.cache.heads + head) * kDim + 2 * (lane_ % 4);
#pragma unroll
    for (int n = 0; n < kWarpColumns; ++n) {
      *reinterpret_cast<float2*>(out + (warp_ * kWarpColumns + n) * 8) = {acc_[n].x * inv_row_sum,
                                                                          acc_[n].y * inv_row_sum};
    }
  }

 private:
  __device__ uint8_t* stage(int32_t n) const {
    return ring_ + n % kCombineStages * kSplits * Shape::kPartialBytes;
  }
  __device__ void load(const DecodeItem& item, int32_t chunk) const {
    if (threadIdx.x != 0) return;
    const int32_t first = chunk * kSplits, n = combined_stages_ + chunk;
    const auto bytes =
        static_cast<uint32_t>(min(item.visible.splits() - first, kSplits) * Shape::kPartialBytes);
    uint64_t* full = full_ + n % kCombineStages;
    ptx::barrier_arrive_expect(full, bytes);
    ptx::bulk_copy_kept(stage(n), partial_at<kDim, kFp8>(p_, item, first), bytes, full);
  }
  __device__ __forceinline__ void combine_split(const float* partial) {
    const auto* sums = reinterpret_cast<const float2*>(partial) + warp_ * kWarpColumns * kWarpLanes + lane_;
    add(partial[kMaxHeadGroup * kDim + lane_ / 4], partial[kMaxHeadGroup * (kDim + 1) + lane_ / 4],
        [&](int n) { return sums[n * kWarpLanes]; });
  }
  template <class Sums>
  __device__ __forceinline__ void add(float row_max, float row_sum, const Sums& sums) {
    const SplitCombine::Factors factors = combined_.add(row_max, row_sum);
#pragma unroll
    for (int n = 0; n < kWarpColumns; ++n) {
      const float2 other = sums(n);
      acc_[n] = {factors.combine(acc_[n].x, other.x), factors.combine(acc_[n].y, other.y)};
    }
  }

  const PagedAttention& p_;
  uint8_t* const ring_;
  uint64_t* const full_;
  const int warp_, lane_;
  int32_t combined_stages_ = 0;  // of the rows before
  SplitCombine combined_;
  float2 acc_[kWarpColumns];
};

// The end of a CTA: its splits, up to 32 at once, are counted, and rows of which it has the last are
// combined.
template <int kDim, bool kFp8>
__device__ void combine_splits(const PagedAttention& p, uint8_t* ring, SplitShared<kDim, kFp8>& shared) {
  const DecodeItems items(p);
  const auto item_of = [&](int32_t k, DecodeItem& item) {
    const int32_t i = static_cast<int32_t>(blockIdx.x) + k * static_cast<int32_t>(gridDim.x);
    return i < items.count && items.at(i, item);
  };
  SplitCombiner<kDim, kFp8> combiner(p, ring, shared.combine_full);
  const int32_t mine =
      (items.count - static_cast<int32_t>(blockIdx.x) - 1) / static_cast<int32_t>(gridDim.x) + 1;
  for (int32_t first = 0; first < mine; first += kWarpLanes) {
    DecodeItem item;
    __syncthreads();  // all splits are written, the ring is free, everybody knows of the rows before
    if (threadIdx.x < kWarpLanes) {
      bool last = false;
      if (item_of(first + static_cast<int32_t>(threadIdx.x), item)) {
        int32_t* arrived = p.arrived + item.row * p.cache.kv_heads + item.kv_head;
        last = ptx::count_in(arrived) == item.visible.splits() - 1;
        if (last) *arrived = 0;
      }
      const uint32_t all = __ballot_sync(kAllLanes, last);
      if (threadIdx.x == 0) shared.last_of_row = all;
    }
    __syncthreads();  // which rows are complete is known
    if (threadIdx.x == 0) ptx::fence_bulk_copies();
    for (uint32_t left = shared.last_of_row; left != 0; left &= left - 1) {
      item_of(first + __ffs(static_cast<int>(left)) - 1, item);
      combiner.run(item);
    }
  }
}

template <int kDim, bool kFp8>
__global__ void __launch_bounds__(kSplitKvThreads, 2)
    decode_split_kv_kernel(const __grid_constant__ PagedAttention p) {
  using Shape = SplitShape<kDim, kFp8>;
  extern __shared__ __align__(1024) uint8_t ring[];
  auto& shared = *reinterpret_cast<SplitShared<kDim, kFp8>*>(ring + Shape::kRingBytes);
  const int warp = threadIdx.x / kWarpLanes, consumer = warp % kConsumerWarps;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kConsumerWarps * Shape::kStages; ++i) {
      auto& of = shared.consumers[i / Shape::kStages];
      ptx::barrier_init(of.full + i % Shape::kStages, 1);
      ptx::barrier_init(of.empty + i % Shape::kStages, kWarpLanes);
    }
    for (int i = 0; i < kCombineStages; ++i) ptx::barrier_init(shared.combine_full + i, 1);
    ptx::barrier_init_fence();
  }
  ptx::let_dependents_start();
  __syncthreads();  // everybody: the barriers are there
  uint8_t* stages = ring + consumer * Shape::kStages * Shape::kStageBytes;
  // With angles, what earlier steps stored is there before the previous kernel has ended.
  if (warp < kConsumerWarps || p.angles == nullptr) ptx::wait_for_previous();
  if (warp < kConsumerWarps) {
    SplitConsumer<kDim, kFp8>(p, consumer, stages, shared).run();
  } else {
    produce_splits(p, consumer, stages, shared);
    ptx::wait_for_previous();
  }
  combine_splits(p, ring, shared);
}

template <int kDim, bool kFp8>
void launch_as(const PagedAttention& op, const Launch& at) {
  // Two CTAs to an SM; as many rows and heads as go into that, so that a CTA's splits are of one of them, and
  // no CTA has two of them to combine.
  const int64_t rows_and_heads = int64_t{op.rows} * op.cache.kv_heads, most = 2 * at.device.sm_count();
  const int64_t ctas = rows_and_heads >= most
                           ? most
                           : rows_and_heads * std::min<int64_t>(most / rows_and_heads, op.max_splits);
  const size_t bytes = SplitShape<kDim, kFp8>::kRingBytes + sizeof(SplitShared<kDim, kFp8>);
  const auto kernel = decode_split_kv_kernel<kDim, kFp8>;
  allow_shared_memory(kernel, bytes);
  launch_dependent("decode_split_kv_kernel", kernel, dim3(static_cast<unsigned>(ctas)), kSplitKvThreads,
                   bytes, at, op);
}

}  // namespace

void launch_decode_split_kv(const PagedAttention& op, const Launch& at) {
  with_decode_shape(op.cache.type, op.cache.head_dim,
                    [&](auto dim, auto fp8) { launch_as<dim(), fp8()>(op, at); });
}

}  // namespace millrace::cuda
