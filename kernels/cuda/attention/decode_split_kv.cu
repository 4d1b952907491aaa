// Attention of single rows whose spans lie side by side, where there are more of them than CTAs fit the GPU:
// long contexts. The numbers are those of packed_attention.cuh.
//
// An item is one span of one row and KV head, up to four tiles of 128 positions, and a warp walks it alone:
// scores of a tile, their softmax within quads of lanes, weights straight from the scores' registers into the
// values' products. So nothing is exchanged and nobody waits, but for memory. A CTA has two such warps, two
// that bring them halves of tiles, in a step of single tokens before the kernel ahead has ended, and it goes
// with another one to an SM. What a span comes to goes to memory; the CTA that has the last of a row's spans
// adds them up in order, with all of its warps, through the ring, which is free by then.
//
// Roofline: 2 x dim x 2 bytes (fp8: 2 x dim + 2) per position and KV head / 4.3 TB/s: 1 us for a tile in each
// SM (dim 64), 1.3 us is what a tile takes one of its four warps. Ring and registers leave room beside a
// streaming kernel (stream_linear.cu), whose successor this is: a quarter of an SM has registers for four
// of its warps and one of 255.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/attention/decode_row.cuh"

namespace millrace::cuda {
namespace {

constexpr int kWalkers = 2, kSpanWarps = 2 * kWalkers, kSpanThreads = kSpanWarps * kWarpLanes;
constexpr int kPieces = 2, kPiecePages = kTilePages / kPieces;  // of a tile
constexpr int kAddBuffers = 4;

template <int kDim, bool kFp8>
struct SpanShape : RowShape<kDim, kFp8, kPiecePages> {
  using Row = RowShape<kDim, kFp8, kPiecePages>;
  static constexpr int kRingBytes = (kDim == 64 ? 80 : 96) * 1024;
  static constexpr int kSlots = kRingBytes / kWalkers / Row::kSlotBytes;  // of a walker
  static constexpr int kWarpColumns = Row::kColumns / kSpanWarps;         // when spans are added up
  static constexpr int kPartialBytes = Row::kPartialFloats * static_cast<int>(sizeof(float));
  static constexpr int kAddSpans = kRingBytes / kAddBuffers / kPartialBytes;  // in a buffer
};

template <int kDim, bool kFp8>
struct SpanShared {  // behind the rings
  using Shape = SpanShape<kDim, kFp8>;
  struct Walker {
    NewRow<kDim> added;
    uint64_t full[Shape::kSlots], empty[Shape::kSlots];
  } walkers[kWalkers];
  uint64_t add_full[kAddBuffers];
  uint32_t complete;  // bits of the CTA's items that were their row's last to arrive
};

// The items of a walker: every kWalkers-th of the CTA's.
struct SpanItems : Items {
  int32_t at_, stride;
  __device__ SpanItems(const PackedAttention& p, int walker)
      : Items(p),
        at_(static_cast<int32_t>(blockIdx.x + gridDim.x * static_cast<uint32_t>(walker))),
        stride(static_cast<int32_t>(gridDim.x) * kWalkers) {}
  __device__ bool next(Item& item) {
    for (; at_ < count; at_ += stride) {
      if (!at(at_, item)) continue;
      at_ += stride;
      return true;
    }
    return false;
  }
};

// One warp: of each tile the keys, then the values. With angles, the row's own are not in the cache yet.
template <int kDim, bool kFp8>
__device__ void bring_spans(const PackedAttention& p, int walker, uint8_t* slots,
                            SpanShared<kDim, kFp8>& shared) {
  using Shape = SpanShape<kDim, kFp8>;
  static_assert(kSpanKeys == kWarpLanes * kBlockTokens);  // a lane has one page of a span
  const int lane = threadIdx.x % kWarpLanes;
  auto& barriers = shared.walkers[walker];
  SpanItems items(p, walker);
  Place place;
  Item item;
  while (items.next(item)) {
    const TileSource source{p.cache, item.table, item.kv_head, item.sight.first / kBlockTokens,
                            item.sight.last + (p.angles == nullptr ? 1 : 0)};
    const int32_t span_block = block_of_page(source, item.first_tile / kSpanTiles * kWarpLanes + lane);
    const int32_t pieces = (item.past_tile - item.first_tile) * 2 * kPieces;
    for (int32_t i = 0; i < pieces; ++i) {
      const int32_t first =
          item.first_tile * kTilePages + (i / (2 * kPieces) * kPieces + i % kPieces) * kPiecePages;
      const int32_t block = __shfl_sync(kAllLanes, span_block, (first + lane % kPiecePages) % kWarpLanes);
      ptx::barrier_wait(barriers.empty + place.slot, place.phase ^ 1u);
      uint8_t* slot = slots + place.slot * Shape::kSlotBytes;
      uint64_t* full = barriers.full + place.slot;
      const auto bring = [&](auto values) {
        if constexpr (kFp8) {
          bring_fp8_pages<kDim, values(), kPiecePages>(source, block, slot, full);
        } else {
          bring_pages<kDim, values(), kPiecePages>(source, first, block, slot, full);
        }
      };
      if (i % (2 * kPieces) < kPieces) {
        bring(std::false_type{});
      } else {
        bring(std::true_type{});
      }
      place = place.next(Shape::kSlots);
    }
  }
}

template <int kDim, bool kFp8>
__device__ float* partial_of(const PackedAttention& p, const Item& item, int32_t span) {
  const int64_t place = item.row * p.cache.kv_heads + item.kv_head;
  return p.partial + (place * p.max_spans + span) * SpanShape<kDim, kFp8>::kPartialFloats;
}

template <int kDim, bool kFp8>
class SpanWalker {
  using Shape = SpanShape<kDim, kFp8>;

 public:
  __device__ SpanWalker(const PackedAttention& p, int walker, uint8_t* slots, SpanShared<kDim, kFp8>& shared)
      : p_(p),
        items_(p, walker),
        slots_(slots),
        shared_(shared.walkers[walker]),
        lane_(threadIdx.x % kWarpLanes),
        group_(p.cache.heads / p.cache.kv_heads) {}

  __device__ void run() {
    Item item;
    while (items_.next(item)) {
      walk(item);
      store(item);
    }
  }

 private:
  __device__ uint8_t* slot() const { return slots_ + place_.slot * Shape::kSlotBytes; }
  __device__ void wait_full() const { ptx::barrier_wait(shared_.full + place_.slot, place_.phase); }
  // Every lane for itself, an order that racecheck can follow.
  __device__ void release() {
    ptx::barrier_arrive(shared_.empty + place_.slot);
    place_ = place_.next(Shape::kSlots);
  }

  __device__ void load_row(const Item& item, bool appends) {
    const int g = lane_ / 4;
    const float* query = p_.query + (item.row * p_.cache.heads + item.kv_head * group_ + g) * kDim;
    const float2* turns = p_.angles != nullptr ? p_.angles + item.row * (kDim / 2) : nullptr;
    query_.load(g < group_ ? query : nullptr, turns, p_.interleaved, p_.op.scale * kLog2e);
    if (!appends) return;
    const int64_t kv_row = (item.row * p_.cache.kv_heads + item.kv_head) * kDim;
    for (int i = lane_; i < kDim / 2; i += kWarpLanes) {
      reinterpret_cast<float2*>(shared_.added.key)[i] = reinterpret_cast<const float2*>(p_.key + kv_row)[i];
      reinterpret_cast<float2*>(shared_.added.value)[i] =
          reinterpret_cast<const float2*>(p_.value + kv_row)[i];
      shared_.added.turns[i] = turns[i];
    }
    __syncwarp();
  }

  __device__ void walk(const Item& item) {
    const bool appends = p_.angles != nullptr && item.sight.last / kKeyTile == item.past_tile - 1;
    const int32_t block = appends ? item.table[item.sight.last / kBlockTokens] : 0;
    load_row(item, appends);
    const Append<kDim, kFp8, kPiecePages> append{shared_.added, p_.interleaved, item.sight.last};
    top_ = -INFINITY, weight_ = 0.0f;
#pragma unroll
    for (int n = 0; n < Shape::kColumns; ++n) sum_[n][0] = sum_[n][1] = sum_[n][2] = sum_[n][3] = 0.0f;
    for (int32_t tile = item.first_tile; tile < item.past_tile; ++tile) {
      // The piece that the new token is in, if it is one of this tile's.
      const int appended = appends && tile == item.past_tile - 1
                               ? item.sight.last % kKeyTile / (kPiecePages * kBlockTokens)
                               : -1;
      PageScores scores[kPieces][kPiecePages];
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        wait_full();
        if (piece == appended) append.template into_slot<false>(slot());
#pragma unroll
        for (int page = 0; page < kPiecePages; ++page) {
          page_scores<kPiecePages>(query_, slot(), page, scores[piece][page]);
        }
        if (piece == appended) append.template into_cache<false>(p_.cache, block, item.kv_head, slot());
        release();
      }
      soften(item, tile, scores);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        wait_full();
        if (piece == appended) append.template into_slot<true>(slot());
        add_pages<kDim, kFp8, kPiecePages>(slot(), 0, weights_[piece], 0, sum_);
        if (piece == appended) append.template into_cache<true>(p_.cache, block, item.kv_head, slot());
        release();
      }
    }
  }

  // Scores of a tile become weights, the sums so far are multiplied with what that does to them.
  __device__ __forceinline__ void soften(const Item& item, int32_t tile,
                                         PageScores (&scores)[kPieces][kPiecePages]) {
    const auto page_of = [&](int i) -> PageScores& { return scores[i / kPiecePages][i % kPiecePages]; };
    const int t = lane_ % 4;
    const int32_t from = tile * kKeyTile;
    if (from < item.sight.first || from + kKeyTile - 1 > item.sight.last) {
#pragma unroll
      for (int i = 0; i < 4 * kTilePages; ++i) {
        const int32_t position = from + i / 4 * kBlockTokens + i % 4 / 2 * 8 + 2 * t + i % 2;
        if (position < item.sight.first || position > item.sight.last) page_of(i / 4).hide(i % 4);
      }
    }
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4 * kTilePages; ++i) most = fmaxf(most, page_of(i / 4).of[i % 4]);
    const float new_top = fmaxf(top_, quad_max(most)), base = base_of(new_top), by = exp2_of(top_ - base);
    top_ = new_top;
    float sums[kTilePages];
#pragma unroll
    for (int page = 0; page < kTilePages; ++page) {
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = exp2_of(page_of(page).of[i] - base);
      sums[page] = (w[0] + w[1]) + (w[2] + w[3]);
#pragma unroll
      for (int i = 0; i < 4 && kFp8; ++i) w[i] *= page_of(page).value_scale(i);
      weights_[page / kPiecePages][page % kPiecePages] = {pack_bf16(w[0], w[1]), pack_bf16(w[2], w[3])};
    }
    weight_ = fmaf(weight_, by,
                   ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7])));
#pragma unroll
    for (int n = 0; n < Shape::kColumns; ++n) sum_[n][0] *= by, sum_[n][1] *= by;
  }

  // Sums lie as the lanes have them.
  __device__ void store(const Item& item) const {
    const float weight = quad_sum(weight_);
    float* partial = partial_of<kDim, kFp8>(p_, item, max(item.span, 0));
#pragma unroll
    for (int n = 0; n < Shape::kColumns; ++n) {
      reinterpret_cast<float2*>(partial)[n * kWarpLanes + lane_] = {sum_[n][0], sum_[n][1]};
    }
    if (lane_ % 4 == 0) {
      partial[kMaxHeadGroup * kDim + lane_ / 4] = top_;
      partial[kMaxHeadGroup * (kDim + 1) + lane_ / 4] = weight;
    }
  }

  const PackedAttention& p_;
  SpanItems items_;
  uint8_t* const slots_;
  typename SpanShared<kDim, kFp8>::Walker& shared_;
  const int lane_, group_;
  Place place_;
  RowQuery<kDim, kFp8> query_;
  static_assert(kPiecePages == 4);
  uint2 weights_[kPieces][4];      // of the tile's pages
  float top_, weight_;             // of head g, of the span; weight_ is this lane's share
  float sum_[Shape::kColumns][4];  // [n][0..1]: head g, dimensions 2t, 2t + 1 of column n; the rest is zero
};

// Adds up the spans of rows that are complete: each warp has its columns. Spans come by copies, some in each
// buffer.
template <int kDim, bool kFp8>
class SpanAdder {
  using Shape = SpanShape<kDim, kFp8>;
  static constexpr int kMine = Shape::kWarpColumns, kSpans = Shape::kAddSpans;

 public:
  __device__ SpanAdder(const PackedAttention& p, uint8_t* ring, uint64_t* full)
      : p_(p), ring_(ring), full_(full), warp_(threadIdx.x / kWarpLanes), lane_(threadIdx.x % kWarpLanes) {}

  __device__ void run(const Item& item) {
    const int g = lane_ / 4, group = p_.cache.heads / p_.cache.kv_heads, head = item.kv_head * group + g;
    const bool sinks = p_.op.sinks != nullptr && g < group;
    const float sink = sinks ? __ldg(p_.op.sinks + head) * kLog2e : 0.0f;
    const int32_t spans = item.sight.spans(), chunks = (spans + kSpans - 1) / kSpans;
    for (int32_t chunk = 0; chunk < min(chunks, kAddBuffers); ++chunk) bring(item, chunk);
    total_ = {};
#pragma unroll
    for (int n = 0; n < kMine; ++n) sum_[n] = {0.0f, 0.0f};
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
      const int32_t order = before_ + chunk, count = spans - chunk * kSpans;
      ptx::barrier_wait(full_ + order % kAddBuffers, static_cast<uint32_t>(order / kAddBuffers) & 1u);
      const auto* from = reinterpret_cast<const float*>(buffer(order));
      if (count >= kSpans) {  // their loads and exponentials overlap
#pragma unroll
        for (int i = 0; i < kSpans; ++i) add_span(from + i * Shape::kPartialFloats);
      } else {
#pragma unroll 1
        for (int i = 0; i < count; ++i) add_span(from + i * Shape::kPartialFloats);
      }
      __syncthreads();  // everybody has read the buffer
      if (chunk + kAddBuffers < chunks) bring(item, chunk + kAddBuffers);
    }
    before_ += chunks;
    if (g >= group) return;
    if (sinks) add(sink, 1.0f, [](int) { return float2{0.0f, 0.0f}; });
    const float share = 1.0f / total_.weight;
    float* out = p_.out + (item.row * p_.cache.heads + head) * kDim + 2 * (lane_ % 4);
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      *reinterpret_cast<float2*>(out + (warp_ * kMine + n) * 8) = {sum_[n].x * share, sum_[n].y * share};
    }
  }

 private:
  __device__ uint8_t* buffer(int32_t order) const {
    return ring_ + order % kAddBuffers * kSpans * Shape::kPartialBytes;
  }
  __device__ void bring(const Item& item, int32_t chunk) const {
    if (threadIdx.x != 0) return;
    const int32_t first = chunk * kSpans, order = before_ + chunk;
    const auto bytes = static_cast<uint32_t>(min(item.sight.spans() - first, kSpans) * Shape::kPartialBytes);
    uint64_t* full = full_ + order % kAddBuffers;
    ptx::barrier_arrive_expect(full, bytes);
    ptx::bulk_copy_kept(buffer(order), partial_of<kDim, kFp8>(p_, item, first), bytes, full);
  }
  __device__ __forceinline__ void add_span(const float* partial) {
    const auto* sums = reinterpret_cast<const float2*>(partial) + warp_ * kMine * kWarpLanes + lane_;
    add(partial[kMaxHeadGroup * kDim + lane_ / 4], partial[kMaxHeadGroup * (kDim + 1) + lane_ / 4],
        [&](int n) { return sums[n * kWarpLanes]; });
  }
  template <class Sums>
  __device__ __forceinline__ void add(float top, float weight, const Sums& sums) {
    const SpanMerge::Factors by = total_.add(top, weight);
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      const float2 other = sums(n);
      sum_[n] = {by.merge(sum_[n].x, other.x), by.merge(sum_[n].y, other.y)};
    }
  }

  const PackedAttention& p_;
  uint8_t* const ring_;
  uint64_t* const full_;
  const int warp_, lane_;
  int32_t before_ = 0;  // buffers of the rows before
  SpanMerge total_;
  float2 sum_[kMine];
};

// What this thread has seen in global memory comes before the copies that it asks for.
__device__ inline void order_copies() { MILLRACE_BULK_ASM("fence.proxy.async;" ::: "memory"); }

// The end of a CTA: its spans, up to 32 at once, are counted, and rows of which it has the last are added up.
template <int kDim, bool kFp8>
__device__ void add_spans(const PackedAttention& p, uint8_t* ring, SpanShared<kDim, kFp8>& shared) {
  const Items items(p);
  const auto item_of = [&](int32_t k, Item& item) {
    const int32_t i = static_cast<int32_t>(blockIdx.x) + k * static_cast<int32_t>(gridDim.x);
    return i < items.count && items.at(i, item);
  };
  SpanAdder<kDim, kFp8> adder(p, ring, shared.add_full);
  const int32_t mine =
      (items.count - static_cast<int32_t>(blockIdx.x) - 1) / static_cast<int32_t>(gridDim.x) + 1;
  for (int32_t first = 0; first < mine; first += kWarpLanes) {
    Item item;
    __syncthreads();  // all spans are written, the ring is free, everybody knows of the rows before
    if (threadIdx.x < kWarpLanes) {
      bool last = false;
      if (item_of(first + static_cast<int32_t>(threadIdx.x), item)) {
        int32_t* arrived = p.arrived + item.row * p.cache.kv_heads + item.kv_head;
        last = ptx::count_in(arrived) == item.sight.spans() - 1;
        if (last) *arrived = 0;
      }
      const uint32_t all = __ballot_sync(kAllLanes, last);
      if (threadIdx.x == 0) shared.complete = all;
    }
    __syncthreads();  // which rows are complete is known
    if (threadIdx.x == 0) order_copies();
    for (uint32_t left = shared.complete; left != 0; left &= left - 1) {
      item_of(first + __ffs(static_cast<int>(left)) - 1, item);
      adder.run(item);
    }
  }
}

template <int kDim, bool kFp8>
__global__ void __launch_bounds__(kSpanThreads, 2)
    packed_spans_kernel(const __grid_constant__ PackedAttention p) {
  using Shape = SpanShape<kDim, kFp8>;
  extern __shared__ __align__(1024) uint8_t ring[];
  auto& shared = *reinterpret_cast<SpanShared<kDim, kFp8>*>(ring + Shape::kRingBytes);
  const int warp = threadIdx.x / kWarpLanes, walker = warp % kWalkers;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kWalkers * Shape::kSlots; ++i) {
      auto& of = shared.walkers[i / Shape::kSlots];
      ptx::barrier_init(of.full + i % Shape::kSlots, 1);
      ptx::barrier_init(of.empty + i % Shape::kSlots, kWarpLanes);
    }
    for (int i = 0; i < kAddBuffers; ++i) ptx::barrier_init(shared.add_full + i, 1);
    ptx::barrier_init_fence();
  }
  ptx::let_dependents_start();
  __syncthreads();  // the barriers are there
  uint8_t* slots = ring + walker * Shape::kSlots * Shape::kSlotBytes;
  // With angles, what earlier steps stored is there before the kernel ahead has ended.
  if (warp < kWalkers || p.angles == nullptr) ptx::wait_for_previous();
  if (warp < kWalkers) {
    SpanWalker<kDim, kFp8>(p, walker, slots, shared).run();
  } else {
    bring_spans(p, walker, slots, shared);
    ptx::wait_for_previous();
  }
  add_spans(p, ring, shared);
}

template <int kDim, bool kFp8>
void launch_as(const PackedAttention& op, const Launch& at) {
  // Two CTAs to an SM; as many rows and heads as go into that, so that a CTA's spans are of one of them, and
  // no CTA has two of them to add up.
  const int64_t rows_and_heads = int64_t{op.rows} * op.cache.kv_heads, most = 2 * at.device.sm_count();
  const int64_t ctas =
      rows_and_heads >= most ? most : rows_and_heads * std::min<int64_t>(most / rows_and_heads, op.max_spans);
  const size_t bytes = SpanShape<kDim, kFp8>::kRingBytes + sizeof(SpanShared<kDim, kFp8>);
  const auto kernel = packed_spans_kernel<kDim, kFp8>;
  allow_shared_memory(kernel, bytes);
  launch_dependent("packed_spans_kernel", kernel, dim3(static_cast<unsigned>(ctas)), kSpanThreads, bytes, at,
                   op);
}

}  // namespace

void launch_packed_spans(const PackedAttention& op, const Launch& at) {
  with_row_shape(op.cache.type, op.cache.head_dim,
                 [&](auto dim, auto fp8) { launch_as<dim(), fp8()>(op, at); });
}

}  // namespace millrace::cuda
