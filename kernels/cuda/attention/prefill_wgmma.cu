// Attention of many rows that follow one another, on Hopper's warpgroup products: the numbers of
// packed_attention.cuh to the bit.
//
// A persistent CTA walks its share of (chunk of a sequence, KV head). Two warps bring tiles of 128 positions
// by bulk copies, one the keys and one the values; the cache is kept in the order in which the tensor cores
// take both. Three warpgroups (two for 128 dimensions) have 64 rows of the product each: a row is one query
// head of one token, so that a KV head's keys serve all its query heads. The scores of the next tile and the
// values of this one are multiplied while the softmax of the next tile waits for its scores, and while the
// other warpgroups compute theirs. Only tiles at the edge of what a row sees are masked. What a row has of
// the spans before lies in shared memory: it is needed once in four tiles. Of an fp8 cache codes come into
// the upper halves of a slot's pages, and four warps, two for the keys and two for the values, make bf16 of
// them in place: the products do not know of it.
//
// Roofline: 4 x 64 x 128 x dim operations per warpgroup and tile: 512 cycles of the tensor cores at dim 64,
// beside 512 cycles of the unit that computes exponentials (16 a cycle) and some 350 of everything else.
#include <algorithm>

#include "kernels/cuda/attention/paged_tile.cuh"

#if defined(__CUDA_ARCH__) && !defined(MILLRACE_HAS_WGMMA)
#pragma nv_diag_suppress 177  // unused: for this architecture the kernel is empty
#endif

namespace millrace::cuda {
namespace {

constexpr int kGroupRows = 64, kGroupThreads = 128, kGroupWarps = 4;

template <int kDim, bool kFp8>
struct PromptShape {
  static constexpr int kParts = kDim / kPartDims;
  static constexpr int kConsumers = prompt_rows(kDim) / kGroupRows;
  static constexpr int kThreads = (kConsumers + 1) * kGroupThreads;
  // What a launch gives each thread, dealt anew; converting takes more than asking for copies.
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : (kFp8 ? 224 : 232);
  static constexpr int kLoaderRegisters = kConsumers == 3 ? 32 : (kFp8 ? 56 : 40);
  static_assert(kConsumers * kConsumerRegisters + kLoaderRegisters <=
                65536 / kThreads / 8 * 8 * kThreads / kGroupThreads);
  static constexpr int kLoaders = kFp8 ? 2 : 1;      // warps that fill a slot
  static constexpr int kSlots = kDim == 64 ? 4 : 2;  // of keys, and as many of values
  static constexpr int kSlotBytes = kParts * kTilePartBytes;
  static constexpr int kQueryPartBytes = kGroupRows * ptx::kSwizzleRowBytes;
  static constexpr int kQueryBytes = kParts * kQueryPartBytes;  // of a warpgroup
  static constexpr int kTotalBytes = kGroupRows * kDim * static_cast<int>(sizeof(float));
  // Shared memory: keys, values, queries, totals, barriers, records of the first items.
  static constexpr int kValuesAt = kSlots * kSlotBytes;
  static constexpr int kQueriesAt = 2 * kValuesAt;
  static constexpr int kTotalsAt = kQueriesAt + kConsumers * kQueryBytes;
  static constexpr int kBarriersAt = kTotalsAt + kConsumers * kTotalBytes;
  static constexpr int kRecordsAt = kBarriersAt + 4 * kSlots * static_cast<int>(sizeof(uint64_t));
  static constexpr int kRecords = 128;  // items that are looked up ahead
  // And of an fp8 cache, for keys and values: barriers of codes that have come, their scales with what a tile
  // is.
  static constexpr int kCodesAt = kRecordsAt + kRecords * static_cast<int>(sizeof(int4));
  static constexpr int kScalesBytes = kKeyTile + static_cast<int>(sizeof(int4));
  static constexpr int kScalesAt = kCodesAt + 2 * kSlots * static_cast<int>(sizeof(uint64_t));
  static constexpr int kSharedBytes = kFp8 ? kScalesAt + 2 * kSlots * kScalesBytes : kCodesAt;
  static_assert(kSharedBytes <= 232448);
};

// Rows of one sequence with one KV head.
struct PromptItem {
  int32_t first_row, tokens, position, sequence;  // position: of the first row
  int kv_head;

  __device__ int32_t first(const PackedAttention& p) const { return sight_of(position, p.op.window).first; }
  __device__ int32_t first_tile(const PackedAttention& p) const { return first(p) / kKeyTile; }
  __device__ int32_t past_tile() const { return (position + tokens - 1) / kKeyTile + 1; }
};

// The items of this CTA: heavy ones come first, so every second round goes the other way.
struct PromptItems {
  const PackedAttention& p;
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
  __device__ void look_up() const {
    for (int32_t r = static_cast<int32_t>(threadIdx.x); r < count; r += static_cast<int32_t>(blockDim.x)) {
      if (has(r)) records[r] = record(r);
    }
  }
  __device__ PromptItem at(int32_t round) const {
    const int4 r = round < count ? records[round] : record(round);
    return {r.x, r.y, r.z, r.w, index(round) % p.cache.kv_heads};
  }
};

#ifdef MILLRACE_HAS_WGMMA

// Slots of keys or values; n counts tiles through, over all items of a CTA.
template <int kDim, bool kFp8>
struct PromptRing {
  using Shape = PromptShape<kDim, kFp8>;
  uint8_t *slots, *scales;
  uint64_t *full, *empty, *codes;

  __device__ PromptRing(uint8_t* shared, bool values)
      : slots(shared + (values ? Shape::kValuesAt : 0)),
        scales(shared + Shape::kScalesAt + (values ? Shape::kSlots * Shape::kScalesBytes : 0)),
        full(reinterpret_cast<uint64_t*>(shared + Shape::kBarriersAt) + (values ? 2 * Shape::kSlots : 0)),
        empty(full + Shape::kSlots),
        codes(reinterpret_cast<uint64_t*>(shared + Shape::kCodesAt) + (values ? Shape::kSlots : 0)) {}
  __device__ void init() const {
    for (int i = 0; i < Shape::kSlots; ++i) {
      ptx::barrier_init(full + i, Shape::kLoaders);
      ptx::barrier_init(empty + i, Shape::kConsumers * kGroupWarps);
      if constexpr (kFp8) ptx::barrier_init(codes + i, 1);
    }
  }
  __device__ uint8_t* slot(uint32_t n) const { return slots + n % Shape::kSlots * Shape::kSlotBytes; }
  __device__ void wait_full(uint32_t n) const {
    ptx::barrier_wait(full + n % Shape::kSlots, n / Shape::kSlots % 2);
  }
  __device__ void wait_empty(uint32_t n) const {
    ptx::barrier_wait(empty + n % Shape::kSlots, n / Shape::kSlots % 2 ^ 1);
  }
  // The same for all lanes.
  __device__ bool is_empty(uint32_t n) const {
    const bool mine = ptx::barrier_test(empty + n % Shape::kSlots, n / Shape::kSlots % 2 ^ 1);
    return __all_sync(kAllLanes, mine);
  }
  __device__ void wait_codes(uint32_t n) const {
    ptx::barrier_wait(codes + n % Shape::kSlots, n / Shape::kSlots % 2);
  }
  __device__ uint8_t* scales_of(uint32_t n) const { return scales + n % Shape::kSlots * Shape::kScalesBytes; }
  // Counted from the tile's begin: the first page that is seen, past the last position; is there another?
  __device__ int4* about(uint32_t n) const { return reinterpret_cast<int4*>(scales_of(n) + kKeyTile); }
  __device__ void release(uint32_t n) const {
    if (threadIdx.x % kWarpLanes == 0) ptx::barrier_arrive(empty + n % Shape::kSlots);
  }
};

// What a warp makes of the codes of 64 dimensions of a page: rows of bf16. A lane has 16 bytes of each half
// of the page (its keys 0-7 and 8-15, or as many values): where they come from and go to in the first is all
// that it keeps, the rest follows by constants.
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
      row = g % 4 * 2 + g / 4;  // in this order lanes that store together meet no bank twice
      from = row * kFp8PartDims + t * 16;
      to = ptx::swizzled(row, t * 8);
    }
  }
  // By what the codes are multiplied: keys, or two rows of values; those that nobody stored (from `rows` on)
  // become zeros, since a weight of zero does not undo an infinite scale.
  __device__ __forceinline__ uint32_t factors(const uint8_t* scales, int half, int32_t rows) const {
    const int at = static_cast<int>(row) + 8 * half;
    if constexpr (!kValues) return fp8_factor(scales[at]) * 0x10001u;
    const uint32_t two = *reinterpret_cast<const uint16_t*>(scales + at);
    return (at < rows ? fp8_factor(two & 255u) : 0u) | (at + 1 < rows ? fp8_factor(two >> 8) << 16 : 0u);
  }
  __device__ __forceinline__ void store(const uint4& codes, uint32_t by, int half, uint8_t* page) const {
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    if constexpr (kValues) {
      const uint32_t first = ptx::permute(by, 0u, 0x1010u), second = ptx::permute(by, 0u, 0x3232u);
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
            uint2{codes_to_bf16<kCodes01>(words[k], by), codes_to_bf16<kCodes23>(words[k], by)};
      }
    }
  }
};

// All tiles of all items, in the order in which they are used.
struct TileWalk {
  const PackedAttention& p;
  const PromptItems& items;
  int32_t round = 0, tile = 0, past_tile = 0;
  uint32_t n = 0;  // tiles so far
  PromptItem item{};

  __device__ TileWalk(const PackedAttention& op, const PromptItems& all) : p(op), items(all) { enter(); }
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

template <int kDim, bool kValues>
__device__ void bring_codes(const TileWalk& at, const PromptRing<kDim, true>& ring) {
  const LayerCache& cache = at.p.cache;
  const int lane = threadIdx.x % kWarpLanes, place = lane % kTilePages, part = lane / kTilePages;
  const int32_t page = at.tile * kTilePages + place;
  const bool mine = part < kDim / kPartDims && page >= at.first_page() && page * kBlockTokens < at.past();
  const uint32_t bytes = (mine ? kFp8PartBytes : 0) + (mine && part == 0 ? kBlockTokens : 0);
  const uint32_t all = __reduce_add_sync(kAllLanes, bytes);
  uint64_t* come = ring.codes + at.n % PromptShape<kDim, true>::kSlots;
  if (lane == 0) {
    *ring.about(at.n) = {at.first_page() - at.tile * kTilePages, at.past() - at.tile * kKeyTile,
                         at.more() ? 1 : 0, 0};
    ptx::barrier_arrive_expect(come, all);
  }
  __syncwarp();
  if (!mine) return;
  const int32_t block = cache.tables[cache.table_starts[at.item.sequence] + page];
  const Fp8Head head = fp8_head(cache, block, at.item.kv_head);
  ptx::bulk_copy_kept(ring.slot(at.n) + part * kTilePartBytes + place * kPagePartBytes + kFp8PartBytes,
                      (kValues ? head.values : head.keys) + part * kFp8PartBytes, kFp8PartBytes, come);
  if (part > 0) return;
  ptx::bulk_copy_kept(ring.scales_of(at.n) + place * kBlockTokens, head.scales + (kValues ? kBlockTokens : 0),
                      kBlockTokens, come);
}

// Every second page of a tile, by one of two warps: a lane has read its codes before any lane stores. Seen
// are pages from `first_page` on and positions before `past`, counted from the tile's.
template <int kDim, bool kValues>
__device__ __forceinline__ void convert_tile(const Fp8Lane<kValues>& mine, int first_page, int past, int half,
                                             uint8_t* slot, const uint8_t* scales, uint64_t* full) {
#pragma unroll 1
  for (int i = half; i < kTilePages; i += 2) {
    const int rows = i < first_page ? 0 : past - i * kBlockTokens;
    uint32_t by[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) by[h] = mine.factors(scales + i * kBlockTokens, h, rows);
#pragma unroll 1
    for (int part = 0; part < kDim / kPartDims; ++part) {
      uint8_t* to = slot + part * kTilePartBytes + i * kPagePartBytes;
      uint4 codes[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        codes[h] = *reinterpret_cast<const uint4*>(to + kFp8PartBytes + mine.from + h * 512);
      }
      __syncwarp();
#pragma unroll
      for (int h = 0; h < 2; ++h) mine.store(codes[h], by[h], h, to);
    }
  }
  ptx::publish_to_async();
  __syncwarp();  // all lanes' rows are there, for the tensor cores too
  if (threadIdx.x % kWarpLanes == 0) ptx::barrier_arrive(full);
}

// One warp, keys or values.
template <int kDim, bool kValues>
__device__ void bring_tiles(const PackedAttention& p, const PromptItems& items,
                            const PromptRing<kDim, false>& ring, int /*half*/) {
  uint32_t n = 0;
  for (int32_t round = 0; items.has(round); ++round) {
    const PromptItem item = items.at(round);
    const TileSource source{p.cache, p.cache.tables + p.cache.table_starts[item.sequence], item.kv_head,
                            item.first(p) / kBlockTokens, item.position + item.tokens};
    for (int32_t tile = item.first_tile(p); tile < item.past_tile(); ++tile, ++n) {
      ring.wait_empty(n);
      bring_tile<kDim, kValues>(source, tile, ring.slot(n), ring.full + n % PromptShape<kDim, false>::kSlots);
    }
  }
}
// The same of an fp8 cache by two, the first of which asks for codes, as far ahead as slots are empty.
template <int kDim, bool kValues>
__device__ void bring_tiles(const PackedAttention& p, const PromptItems& items,
                            const PromptRing<kDim, true>& ring, int half) {
  constexpr uint32_t kSlots = PromptShape<kDim, true>::kSlots;
  const Fp8Lane<kValues> mine;
  TileWalk ahead(p, items);
  bool more = true;
  for (uint32_t n = 0; more; ++n) {
    while (half == 0 && ahead.has() && ahead.n < n + kSlots) {
      if (ahead.n > n && !ring.is_empty(ahead.n)) break;
      ring.wait_empty(ahead.n);
      bring_codes<kDim, kValues>(ahead, ring);
      ahead.next();
    }
    ring.wait_codes(n);
    const int4 about = *ring.about(n);
    convert_tile<kDim>(mine, about.x, about.y, half, ring.slot(n), ring.scales_of(n), ring.full + n % kSlots);
    more = about.z != 0;
  }
}

// A warpgroup's 64 rows. Lane (g, t) of warp w has rows 16w + g and 16w + g + 8, of a tile's scores columns
// 8j + 2t and + 1.
template <int kDim, bool kFp8>
class PromptRows {
  using Shape = PromptShape<kDim, kFp8>;
  static constexpr int kSums = kDim / 2;
  static constexpr int kChunks = kDim / 8, kQueryLoads = kGroupRows * kChunks / kGroupThreads;

 public:
  __device__ PromptRows(const PackedAttention& p, uint8_t* shared)
      : p_(p),
        keys_(shared, false),
        values_(shared, true),
        warpgroup_(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / kGroupThreads), 0)),
        thread_(threadIdx.x % kGroupThreads),
        queries_(shared + Shape::kQueriesAt + warpgroup_ * Shape::kQueryBytes),
        total_sums_(reinterpret_cast<float4*>(shared + Shape::kTotalsAt + warpgroup_ * Shape::kTotalBytes) +
                    thread_),
        group_(p.cache.heads / p.cache.kv_heads) {}

  __device__ __forceinline__ void run(const PromptItems& items) {
    float4 raw[kQueryLoads][2];
    load_queries(items.at(0), raw);
    for (int32_t round = 0; items.has(round); ++round) {
      const PromptItem item = items.at(round);
      store_queries(raw);
      const bool more = items.has(round + 1);
      attend(item, more ? items.at(round + 1) : item, raw);
    }
  }

 private:
  __device__ int first_row() const { return warpgroup_ * kGroupRows; }
  __device__ void meet() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + warpgroup_), "n"(kGroupThreads) : "memory");
  }

  // Leaves the queries of the next item in `raw`: on their way while this one's last are added and stored.
  __device__ __forceinline__ void attend(const PromptItem& item, const PromptItem& next,
                                         float4 (&raw)[kQueryLoads][2]) {
    const int32_t first_tile = item.first_tile(p_), past_tile = item.past_tile();
    const int32_t tiles = past_tile - first_tile;
    if (first_row() >= item.tokens * group_) {  // no rows for this warpgroup
      for (int32_t i = 0; i < tiles; ++i, ++n_) {
        keys_.wait_full(n_);
        keys_.release(n_);
        values_.wait_full(n_);
        values_.release(n_);
      }
      load_queries(next, raw);
      return;
    }
    begin(item);
    float score[kKeyTile / 2], sum[kSums];
    uint32_t weight[kTilePages][4];
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i] = 0.0f;

    keys_.wait_full(n_);
    multiply_keys(score);
    ptx::wgmma_wait<0>();
    ptx::hold_sums(score);
    keys_.release(n_);
    float by[2];
    soften(first_tile, score, by);
    round_weights(score, weight);
    if (tiles > 1) keys_.wait_full(n_ + 1);
    for (int32_t tile = first_tile + 1; tile < past_tile; ++tile) {
      ptx::hold_sums(sum);
      multiply_keys_at(n_ + 1, score);
      values_.wait_full(n_);
      multiply_values(weight, sum);
      ptx::wgmma_wait<1>();
      ptx::hold_sums(score);
      keys_.release(n_ + 1);
      const bool next_span = tile % kSpanTiles == 0;
      const float top[2] = {top_[0], top_[1]}, share[2] = {share_[0], share_[1]};
      if (next_span) begin_span();
      soften(tile, score, by);
      // Here, since the assembler would have the softmax wait for the values' products; not over this loop.
      ptx::hold_sums(score);
      if (tile + 1 < past_tile) keys_.wait_full(n_ + 2);
      ptx::wgmma_wait<0>();
      ptx::hold_sums(sum);
      hold(weight);
      values_.release(n_);
      ++n_;
      round_weights(score, weight);
      if (next_span) {
        end_span(top, share, sum);
      } else {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sum[i] *= by[i / 2 % 2];
      }
    }
    values_.wait_full(n_);
    ptx::hold_sums(sum);
    multiply_values(weight, sum);
    load_queries(next, raw);
    ptx::wgmma_wait<0>();
    ptx::hold_sums(sum);
    hold(weight);
    values_.release(n_);
    ++n_;
    store(item, sum);
  }

  // Rows past the last token are zeros.
  __device__ __forceinline__ void load_queries(const PromptItem& item, float4 (&raw)[kQueryLoads][2]) const {
    const float* from = p_.query + (int64_t{item.first_row} * p_.cache.heads + item.kv_head * group_) * kDim;
#pragma unroll
    for (int i = 0; i < kQueryLoads; ++i) {
      const int at = i * kGroupThreads + thread_, row = first_row() + at / kChunks;
      const int token = row / group_, head = row - token * group_;
      raw[i][0] = raw[i][1] = float4{0, 0, 0, 0};
      if (token < item.tokens) {
        const auto* x = reinterpret_cast<const float4*>(
            from + (static_cast<int64_t>(token) * p_.cache.heads + head) * kDim + at % kChunks * 8);
        raw[i][0] = x[0], raw[i][1] = x[1];
      }
    }
  }
  // Times scale and log2 e, rounded, to shared memory.
  __device__ __forceinline__ void store_queries(const float4 (&raw)[kQueryLoads][2]) const {
    meet();  // the products with the last item's queries are done
    const float scale = p_.op.scale * kLog2e;
#pragma unroll
    for (int i = 0; i < kQueryLoads; ++i) {
      const int at = i * kGroupThreads + thread_, row = at / kChunks, chunk = at % kChunks;
      const float4 a = raw[i][0], b = raw[i][1];
      *reinterpret_cast<uint4*>(
          queries_ + chunk / 8 * Shape::kQueryPartBytes +
          ptx::swizzled(static_cast<uint32_t>(row), static_cast<uint32_t>(chunk % 8 * 16))) =
          uint4{pack_bf16(a.x * scale, a.y * scale), pack_bf16(a.z * scale, a.w * scale),
                pack_bf16(b.x * scale, b.y * scale), pack_bf16(b.z * scale, b.w * scale)};
    }
    ptx::publish_to_async();
    meet();  // all rows are there
  }

  __device__ void begin(const PromptItem& item) {
    const int lane = thread_ % kWarpLanes;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row() + thread_ / kWarpLanes * 16 + lane / 4 + 8 * r;
      sight_[r] = sight_of(item.position + row / group_, p_.op.window);
      total_[r] = SpanMerge{};
    }
    // Tiles that all rows of the warpgroup see all of need no masks.
    const int32_t first_token = first_row() / group_, last_token = (first_row() + kGroupRows - 1) / group_;
    first_whole_ = (sight_of(item.position + last_token, p_.op.window).first + kKeyTile - 1) / kKeyTile;
    past_whole_ = (item.position + first_token + 1) / kKeyTile;
    begin_span();
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) total_sums_[i * kGroupThreads] = float4{0, 0, 0, 0};
  }
  __device__ void begin_span() {
#pragma unroll
    for (int r = 0; r < 2; ++r) top_[r] = -INFINITY, share_[r] = 0.0f;
  }

  __device__ __forceinline__ void multiply_keys(float (&score)[kKeyTile / 2]) const {
    multiply_keys_at(n_, score);
  }
  __device__ __forceinline__ void multiply_keys_at(uint32_t n, float (&score)[kKeyTile / 2]) const {
    const uint64_t a = ptx::wgmma_operand(queries_), b = ptx::wgmma_operand(keys_.slot(n));
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kDim / 16; ++s) {
      ptx::wgmma_bf16(score, a + s / 4 * (Shape::kQueryPartBytes / 16) + s % 4 * 2,
                      b + s / 4 * (kTilePartBytes / 16) + s % 4 * 2, s > 0);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void multiply_values(const uint32_t (&weight)[kTilePages][4],
                                                  float (&sum)[kSums]) const {
    const uint64_t b = ptx::wgmma_columns(values_.slot(n_), kTilePartBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int page = 0; page < kTilePages; ++page) {
      ptx::wgmma_bf16_columns(sum, weight[page], b + page * (kPagePartBytes / 16));
    }
    ptx::wgmma_commit();
  }
  __device__ static void hold(uint32_t (&weight)[kTilePages][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kTilePages; ++i) asm volatile("" : "+r"(weight[i / 4][i % 4])::"memory");
  }

  // Scores become weights; `by`: what the sums so far are multiplied with.
  __device__ __forceinline__ void soften(int32_t tile, float (&score)[kKeyTile / 2], float (&by)[2]) {
    if (tile < first_whole_ || tile >= past_whole_) mask(tile, score);
    float most[2] = {top_[0], top_[1]};
#pragma unroll
    for (int i = 0; i < kKeyTile / 2; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], score[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = quad_max(most[r]);
      const float base = base_of(most[r]);
      by[r] = exp2_of(top_[r] - base);
      top_[r] = most[r];
      float pages[kTilePages];
#pragma unroll
      for (int page = 0; page < kTilePages; ++page) {
        float* w = score + 8 * page + 2 * r;
        w[0] = exp2_of(w[0] - base), w[1] = exp2_of(w[1] - base);
        w[4] = exp2_of(w[4] - base), w[5] = exp2_of(w[5] - base);
        pages[page] = (w[0] + w[1]) + (w[4] + w[5]);
      }
      share_[r] = fmaf(
          share_[r], by[r],
          ((pages[0] + pages[1]) + (pages[2] + pages[3])) + ((pages[4] + pages[5]) + (pages[6] + pages[7])));
    }
  }
  __device__ __forceinline__ void mask(int32_t tile, float (&score)[kKeyTile / 2]) const {
    const int32_t from = tile * kKeyTile + thread_ % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t low = sight_[r].first - from, high = sight_[r].last - from;
#pragma unroll
      for (int i = 0; i < kKeyTile / 4; ++i) {
        const int column = i / 2 * 8 + i % 2;
        float& s = score[i / 2 * 4 + 2 * r + i % 2];
        s = column >= low && column <= high ? s : -INFINITY;
      }
    }
  }
  __device__ __forceinline__ static void round_weights(const float (&score)[kKeyTile / 2],
                                                       uint32_t (&weight)[kTilePages][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kTilePages; ++i) {
      weight[i / 4][i % 4] = pack_bf16(score[2 * i], score[2 * i + 1]);
    }
  }

  // The span's sums go to the row's and start again at zero.
  __device__ __forceinline__ void end_span(const float (&top)[2], const float (&share)[2],
                                           float (&sum)[kSums]) {
    const SpanMerge::Factors by[2] = {total_[0].add(top[0], quad_sum(share[0])),
                                      total_[1].add(top[1], quad_sum(share[1]))};
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      float4 all = total_sums_[i * kGroupThreads];
      all.x = by[0].merge(all.x, sum[4 * i]), all.y = by[0].merge(all.y, sum[4 * i + 1]);
      all.z = by[1].merge(all.z, sum[4 * i + 2]), all.w = by[1].merge(all.w, sum[4 * i + 3]);
      total_sums_[i * kGroupThreads] = all;
      sum[4 * i] = sum[4 * i + 1] = sum[4 * i + 2] = sum[4 * i + 3] = 0.0f;
    }
  }

  __device__ void store(const PromptItem& item, float (&sum)[kSums]) {
    const int lane = thread_ % kWarpLanes;
    SpanMerge::Factors span[2], sink[2];
    float share[2];
    float* out[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row() + thread_ / kWarpLanes * 16 + lane / 4 + 8 * r;
      const int token = row / group_, head = item.kv_head * group_ + row % group_;
      span[r] = total_[r].add(top_[r], quad_sum(share_[r]));
      sink[r] = {1.0f, 0.0f};
      if (p_.op.sinks != nullptr) sink[r] = total_[r].add(__ldg(p_.op.sinks + head) * kLog2e, 1.0f);
      share[r] = 1.0f / total_[r].weight;
      out[r] = token < item.tokens
                   ? p_.out + (int64_t{item.first_row + token} * p_.cache.heads + head) * kDim + lane % 4 * 2
                   : nullptr;
    }
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      const float4 all = total_sums_[i * kGroupThreads];
      const float before[2][2] = {{all.x, all.y}, {all.z, all.w}};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float v[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          v[e] = span[r].merge(before[r][e], sum[4 * i + 2 * r + e]);
          v[e] = sink[r].merge(v[e], 0.0f) * share[r];
        }
        if (out[r] != nullptr) *reinterpret_cast<float2*>(out[r] + 8 * i) = {v[0], v[1]};
      }
    }
  }

  const PackedAttention& p_;
  const PromptRing<kDim, kFp8> keys_, values_;
  const int warpgroup_, thread_;
  uint8_t* queries_;
  float4* total_sums_;  // [.. of four sums][thread], of the spans before
  const int group_;
  uint32_t n_ = 0;  // tiles so far
  Sight sight_[2];
  int32_t first_whole_, past_whole_;
  float top_[2], share_[2];  // of the span; share_ is this lane's part of the weights' sum
  SpanMerge total_[2];       // of the spans before
};

#endif  // MILLRACE_HAS_WGMMA

template <int kDim, bool kFp8>
__global__ void __launch_bounds__((PromptShape<kDim, kFp8>::kThreads), 1)
    prompt_attention_kernel(const __grid_constant__ PackedAttention p) {
#ifdef MILLRACE_HAS_WGMMA
  using Shape = PromptShape<kDim, kFp8>;
  using Ring = PromptRing<kDim, kFp8>;
  extern __shared__ __align__(1024) uint8_t shared[];
  if (threadIdx.x == 0) {
    Ring(shared, false).init();
    Ring(shared, true).init();
    ptx::barrier_init_fence();
  }
  const PromptItems items{p, reinterpret_cast<int4*>(shared + Shape::kRecordsAt), Shape::kRecords};
  items.look_up();
  ptx::let_dependents_start();
  __syncthreads();  // the barriers and records are there
  ptx::wait_for_previous();
  if (threadIdx.x < Shape::kConsumers * kGroupThreads) {
    ptx::more_registers<Shape::kConsumerRegisters>();
    PromptRows<kDim, kFp8>(p, shared).run(items);
  } else {
    ptx::fewer_registers<Shape::kLoaderRegisters>();
    const int warp = threadIdx.x % kGroupThreads / kWarpLanes;
    if (warp < 2 * Shape::kLoaders) {
      if (warp % 2 == 0) bring_tiles<kDim, false>(p, items, Ring(shared, false), warp / 2);
      if (warp % 2 == 1) bring_tiles<kDim, true>(p, items, Ring(shared, true), warp / 2);
    }
  }
#else
  __trap();
#endif
}

template <int kDim, bool kFp8>
void launch_as(const PackedAttention& op, const Launch& at) {
  using Shape = PromptShape<kDim, kFp8>;
  const auto kernel = prompt_attention_kernel<kDim, kFp8>;
  allow_shared_memory(kernel, Shape::kSharedBytes);
  const int64_t items = int64_t{op.num_chunks} * op.cache.kv_heads;
  launch_dependent("prompt_attention_kernel", kernel,
                   dim3(static_cast<unsigned>(std::min<int64_t>(items, at.device.sm_count()))),
                   Shape::kThreads, Shape::kSharedBytes, at, op);
}

}  // namespace

void launch_prompt_attention(const PackedAttention& op, const Launch& at) {
  if (op.cache.type == DType::kF8E4M3) {
    op.cache.head_dim == 64 ? launch_as<64, true>(op, at) : launch_as<128, true>(op, at);
  } else {
    op.cache.head_dim == 64 ? launch_as<64, false>(op, at) : launch_as<128, false>(op, at);
  }
}

}  // namespace millrace::cuda
