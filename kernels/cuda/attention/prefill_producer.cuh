// Prefill attention (prefill_wgmma.cu): its shared memory, its work items, and the producer warps that load
// tiles of keys and values, of an fp8 cache with those that convert its codes to bf16 in place.
#pragma once

#include "kernels/cuda/attention/paged_tile.cuh"

#if defined(__CUDA_ARCH__) && !defined(MILLRACE_HAS_WGMMA)
#pragma nv_diag_suppress 177  // unused: for this architecture the kernel is empty
#endif

namespace millrace::cuda {

inline constexpr int kWarpgroupRows = 64;  // of Q, one head of one token each

template <int kDim, bool kFp8>
struct PrefillShape {
  static constexpr int kParts = kDim / kPartDims;
  static constexpr int kConsumers = prefill_rows(kDim) / kWarpgroupRows;
  static constexpr int kThreads = (kConsumers + 1) * ptx::kWarpgroupThreads;
  // What a launch gives each thread, dealt anew; converting takes more than issuing copies.
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : (kFp8 ? 224 : 232);
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : (kFp8 ? 56 : 40);
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <=
                65536 / kThreads / 8 * 8 * kThreads / ptx::kWarpgroupThreads);
  static constexpr int kProducerWarps = kFp8 ? 2 : 1;  // warps that fill a stage
  static constexpr int kStages = kDim == 64 ? 4 : 2;   // of keys, and as many of values
  static constexpr int kStageBytes = kParts * kTilePartBytes;
  static constexpr int kQueryPartBytes = kWarpgroupRows * ptx::kSwizzleRowBytes;
  static constexpr int kQueryBytes = kParts * kQueryPartBytes;  // of a warpgroup
  static constexpr int kOutBytes = kWarpgroupRows * kDim * static_cast<int>(sizeof(float));
  // Shared memory: keys, values, queries, accumulators of the splits before, barriers, records of the first
  // items.
  static constexpr int kValuesAt = kStages * kStageBytes;
  static constexpr int kQueriesAt = 2 * kValuesAt;
  static constexpr int kOutAt = kQueriesAt + kConsumers * kQueryBytes;
  static constexpr int kBarriersAt = kOutAt + kConsumers * kOutBytes;
  static constexpr int kRecordsAt = kBarriersAt + 4 * kStages * static_cast<int>(sizeof(uint64_t));
  static constexpr int kRecords = 128;  // items that are looked up ahead
  // And of an fp8 cache, for keys and values: barriers of codes that have come, their scales with what a
  // tile is.
  static constexpr int kCodesAt = kRecordsAt + kRecords * static_cast<int>(sizeof(int4));
  static constexpr int kScalesBytes = kKeyTile + static_cast<int>(sizeof(int4));
  static constexpr int kScalesAt = kCodesAt + 2 * kStages * static_cast<int>(sizeof(uint64_t));
  static constexpr int kSharedBytes = kFp8 ? kScalesAt + 2 * kStages * kScalesBytes : kCodesAt;
  static_assert(kSharedBytes <= 232448);
};

// Rows of one sequence with one KV head.
struct PrefillItem {
  int32_t first_row, tokens, position, sequence;  // position: of the first row
  int kv_head;

  __device__ int32_t first(const PagedAttention& p) const {
    return visible_keys(position, p.op.window).first;
  }
  __device__ int32_t first_tile(const PagedAttention& p) const { return first(p) / kKeyTile; }
  __device__ int32_t past_tile() const { return (position + tokens - 1) / kKeyTile + 1; }
};

// The items of this CTA: heavy ones come first, so every second round goes the other way.
struct PrefillItems {
  const PagedAttention& p;
  int4* records;  // [count] of the first rounds, in shared memory
  int count;

  __device__ int32_t index(int32_t round) const {
    const auto ctas = static_cast<int32_t>(gridDim.x), mine = static_cast<int32_t>(blockIdx.x);
    return round * ctas + (round % 2 == 0 ? mine : ctas - 1 - mine);
  }
  __device__ bool has(int32_t round) const { return index(round) < p.num_chunks * p.cache.kv_heads; }
  __device__ int4 record(int32_t round) const {
    return reinterpret_cast<const int4*>(p.chunks)[index(round) / p.cache.kv_heads];
  }
  // By all threads, before a barrier.
  __device__ void load_records() const {
    for (int32_t r = static_cast<int32_t>(threadIdx.x); r < count; r += static_cast<int32_t>(blockDim.x)) {
      if (has(r)) records[r] = record(r);
    }
  }
  __device__ PrefillItem at(int32_t round) const {
    const int4 r = round < count ? records[round] : record(round);
    return {r.x, r.y, r.z, r.w, index(round) % p.cache.kv_heads};
  }
};

#ifdef MILLRACE_HAS_WGMMA

// Stages of keys or values; n counts tiles through, over all items of a CTA. full: the producer warps arrive
// when a tile is there. empty: a lane of each consumer warp arrives when it has been read. codes_full, of an
// fp8 cache: complete when the copies of codes and scales are.
template <int kDim, bool kFp8>
struct PrefillRing {
  using Shape = PrefillShape<kDim, kFp8>;
  uint8_t *stages, *scales;
  uint64_t *full, *empty, *codes_full;

  __device__ PrefillRing(uint8_t* shared, bool values)
      : stages(shared + (values ? Shape::kValuesAt : 0)),
        scales(shared + Shape::kScalesAt + (values ? Shape::kStages * Shape::kScalesBytes : 0)),
        full(reinterpret_cast<uint64_t*>(shared + Shape::kBarriersAt) + (values ? 2 * Shape::kStages : 0)),
        empty(full + Shape::kStages),
        codes_full(reinterpret_cast<uint64_t*>(shared + Shape::kCodesAt) + (values ? Shape::kStages : 0)) {}
  __device__ void init() const {
    for (int i = 0; i < Shape::kStages; ++i) {
      ptx::barrier_init(full + i, Shape::kProducerWarps);
      ptx::barrier_init(empty + i, Shape::kConsumers * ptx::kWarpgroupWarps);
      if constexpr (kFp8) ptx::barrier_init(codes_full + i, 1);
    }
  }
  __device__ uint8_t* stage(uint32_t n) const { return stages + n % Shape::kStages * Shape::kStageBytes; }
  __device__ void wait_full(uint32_t n) const {
    ptx::barrier_wait(full + n % Shape::kStages, n / Shape::kStages % 2);
  }
  __device__ void wait_empty(uint32_t n) const {
    ptx::barrier_wait(empty + n % Shape::kStages, n / Shape::kStages % 2 ^ 1);
  }
  // The same for all lanes.
  __device__ bool is_empty(uint32_t n) const {
    const bool mine = ptx::barrier_test(empty + n % Shape::kStages, n / Shape::kStages % 2 ^ 1);
    return __all_sync(kAllLanes, mine);
  }
  __device__ void wait_codes(uint32_t n) const {
    ptx::barrier_wait(codes_full + n % Shape::kStages, n / Shape::kStages % 2);
  }
  __device__ uint8_t* scales_of(uint32_t n) const {
    return scales + n % Shape::kStages * Shape::kScalesBytes;
  }
  // Counted from the tile's begin: the first page that is seen, past the last position; is there
  // another?
  __device__ int4* about(uint32_t n) const { return reinterpret_cast<int4*>(scales_of(n) + kKeyTile); }
  __device__ void release(uint32_t n) const {
    if (threadIdx.x % kWarpLanes == 0) ptx::barrier_arrive(empty + n % Shape::kStages);
  }
};

// How a warp converts the codes of 64 dimensions of a page to rows of bf16. A lane has 16 bytes of each half
// of the page (its keys 0-7 and 8-15, or as many values): where they come from and go to in the first is
// all that it keeps, the rest follows by constants.
template <bool kValues>
struct Fp8Lane {
  uint32_t row, from, to;

  __device__ Fp8Lane() {
    const uint32_t lane = threadIdx.x % kWarpLanes, g = lane / 4, t = lane % 4;
    if constexpr (kValues) {
      row = lane / 8 * 2;  // and the next
      from = lane * 16;
      to = ptx::swizzled(row, (lane % 8 ^ lane / 8) * 16);
    } else {
      row = g % 4 * 2 + g / 4;  // in this order no two lanes that store together are in one bank
      from = row * kFp8PartDims + t * 16;
      to = ptx::swizzled(row, t * 8);
    }
  }
  // By what the codes are multiplied: keys, or two rows of values; those that nobody stored (from `rows` on)
  // become zeros, since a probability of zero does not undo an infinite scale.
  __device__ __forceinline__ uint32_t factors(const uint8_t* scales, int half, int32_t rows) const {
    const int at = static_cast<int>(row) + 8 * half;
    if constexpr (!kValues) return fp8_factor(scales[at]) * 0x10001u;
    const uint32_t two = *reinterpret_cast<const uint16_t*>(scales + at);
    return (at < rows ? fp8_factor(two & 255u) : 0u) | (at + 1 < rows ? fp8_factor(two >> 8) << 16 : 0u);
  }
  __device__ __forceinline__ void store(const uint4& codes, uint32_t factor, int half, uint8_t* page) const {
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    if constexpr (kValues) {
      const uint32_t first = ptx::permute(factor, 0u, 0x1010u), second = ptx::permute(factor, 0u, 0x3232u);
      uint32_t even[4], odd[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        even[k] = codes_to_bf16<kCodes02>(words[k], first);
        odd[k] = codes_to_bf16<kCodes13>(words[k], second);
      }
      const uint32_t at = (to ^ (half * 64u)) + half * 1024u;  // pairs 4 to 7: other chunks
      *reinterpret_cast<uint4*>(page + at) = uint4{even[0], even[1], even[2], even[3]};
      *reinterpret_cast<uint4*>(page + ((at ^ 16u) + 128u)) = uint4{odd[0], odd[1], odd[2], odd[3]};
    } else {
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) {
        *reinterpret_cast<uint2*>(page + ((to ^ (32u * k)) + half * 1024u)) =
            uint2{codes_to_bf16<kCodes01>(words[k], factor), codes_to_bf16<kCodes23>(words[k], factor)};
      }
    }
  }
};

// All tiles of all items, in the order in which they are used.
struct TileIterator {
  const PagedAttention& p;
  const PrefillItems& items;
  int32_t round = 0, tile = 0, past_tile = 0;
  uint32_t n = 0;  // tiles so far
  PrefillItem item{};

  __device__ TileIterator(const PagedAttention& op, const PrefillItems& all) : p(op), items(all) { enter(); }
  __device__ bool has() const { return tile < past_tile; }
  __device__ void next() {
    ++n;
    if (++tile == past_tile) ++round, enter();
  }
  __device__ int32_t first_page() const { return item.first(p) / kBlockTokens; }
  __device__ int32_t past() const { return item.position + item.tokens; }
  __device__ bool more() const { return tile + 1 < past_tile || items.has(round + 1); }

 private:
  __device__ void enter() {
    tile = past_tile = 0;
    if (!items.has(round)) return;
    item = items.at(round);
    tile = item.first_tile(p);
    past_tile = item.past_tile();
  }
};

// A tile's codes and scales, by one warp, into a stage that is empty.
template <int kDim, bool kValues>
__device__ void load_codes(const TileIterator& at, const PrefillRing<kDim, true>& ring) {
  const LayerCache& cache = at.p.cache;
  const int lane = threadIdx.x % kWarpLanes, in_tile = lane % kTilePages, part = lane / kTilePages;
  const int32_t page = at.tile * kTilePages + in_tile;
  const bool mine = part < kDim / kPartDims && page >= at.first_page() && page * kBlockTokens < at.past();
  const uint32_t bytes = (mine ? kFp8PartBytes : 0) + (mine && part == 0 ? kBlockTokens : 0);
  const uint32_t all = __reduce_add_sync(kAllLanes, bytes);
  uint64_t* codes_full = ring.codes_full + at.n % PrefillShape<kDim, true>::kStages;
  if (lane == 0) {
    *ring.about(at.n) = {at.first_page() - at.tile * kTilePages, at.past() - at.tile * kKeyTile,
                         at.more() ? 1 : 0, 0};
    ptx::barrier_arrive_expect(codes_full, all);
  }
  __syncwarp();
  if (!mine) return;
  const int32_t block = cache.tables[cache.table_starts[at.item.sequence] + page];
  const Fp8Head head = fp8_head(cache, block, at.item.kv_head);
  ptx::bulk_copy_kept(ring.stage(at.n) + part * kTilePartBytes + in_tile * kPagePartBytes + kFp8PartBytes,
                      (kValues ? head.values : head.keys) + part * kFp8PartBytes, kFp8PartBytes, codes_full);
  if (part > 0) return;
  ptx::bulk_copy_kept(ring.scales_of(at.n) + in_tile * kBlockTokens,
                      head.scales + (kValues ? kBlockTokens : 0), kBlockTokens, codes_full);
}

// Every second page of a tile, by one of two warps: a lane has read its codes before any lane stores. Seen
// are pages from `first_page` on and positions before `past`, counted from the tile's.
template <int kDim, bool kValues>
__device__ __forceinline__ void convert_tile(const Fp8Lane<kValues>& mine, int first_page, int past, int half,
                                             uint8_t* stage, const uint8_t* scales, uint64_t* full) {
#pragma unroll 1
  for (int i = half; i < kTilePages; i += 2) {
    const int rows = i < first_page ? 0 : past - i * kBlockTokens;
    uint32_t factors[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) factors[h] = mine.factors(scales + i * kBlockTokens, h, rows);
#pragma unroll 1
    for (int part = 0; part < kDim / kPartDims; ++part) {
      uint8_t* to = stage + part * kTilePartBytes + i * kPagePartBytes;
      uint4 codes[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        codes[h] = *reinterpret_cast<const uint4*>(to + kFp8PartBytes + mine.from + h * 512);
      }
      __syncwarp();  // all lanes have read: codes and rows lie in the same place
#pragma unroll
      for (int h = 0; h < 2; ++h) mine.store(codes[h], factors[h], h, to);
    }
  }
  ptx::publish_to_async();
  __syncwarp();  // all lanes' rows are there, for the tensor cores too
  if (threadIdx.x % kWarpLanes == 0) ptx::barrier_arrive(full);
}

// The producer of keys or of values, one warp: it waits for an empty stage, its copies complete `full`.
template <int kDim, bool kValues>
__device__ void produce_tiles(const PagedAttention& p, const PrefillItems& items,
                              const PrefillRing<kDim, false>& ring, int /*half*/) {
  uint32_t n = 0;
  for (int32_t round = 0; items.has(round); ++round) {
    const PrefillItem item = items.at(round);
    const TileSource source{p.cache, p.cache.tables + p.cache.table_starts[item.sequence], item.kv_head,
                            item.first(p) / kBlockTokens, item.position + item.tokens};
    for (int32_t tile = item.first_tile(p); tile < item.past_tile(); ++tile, ++n) {
      ring.wait_empty(n);
      load_tile<kDim, kValues>(source, tile, ring.stage(n),
                               ring.full + n % PrefillShape<kDim, false>::kStages);
    }
  }
}
// The same of an fp8 cache by two warps, which convert; the first also loads codes, as far ahead as stages
// are empty.
template <int kDim, bool kValues>
__device__ void produce_tiles(const PagedAttention& p, const PrefillItems& items,
                              const PrefillRing<kDim, true>& ring, int half) {
  constexpr uint32_t kStages = PrefillShape<kDim, true>::kStages;
  const Fp8Lane<kValues> mine;
  TileIterator ahead(p, items);
  bool more = true;
  for (uint32_t n = 0; more; ++n) {
    while (half == 0 && ahead.has() && ahead.n < n + kStages) {
      if (ahead.n > n && !ring.is_empty(ahead.n)) break;
      ring.wait_empty(ahead.n);
      load_codes<kDim, kValues>(ahead, ring);
      ahead.next();
    }
    ring.wait_codes(n);
    const int4 about = *ring.about(n);
    convert_tile<kDim>(mine, about.x, about.y, half, ring.stage(n), ring.scales_of(n),
                       ring.full + n % kStages);
    more = about.z != 0;
  }
}

#endif  // MILLRACE_HAS_WGMMA

}  // namespace millrace::cuda
