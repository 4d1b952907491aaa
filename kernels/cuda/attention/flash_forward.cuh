// The forward kernel on Hopper's warpgroup products. See docs/kernels/cuda_flash_attention.md.
//
// A persistent CTA has one producer warp and two or three consumer warpgroups of 64 rows of queries. The
// producer loads Q of an item once and tiles of K and V through rings of stages, by tensor copies. A consumer
// issues Q K^T of the next tile and P V of this one, and computes the softmax of the next under P V. With two
// warpgroups each has its turn to issue, so that one's softmax runs under the other's products.
//
// E4M3 codes: values come transposed from the workspace (flash_values.cuh), since products of 8 bits take
// K-major operands alone. Scores are dot products times the scales of the row and of the block of keys. The
// log2 of the values' scale joins the exponent: probabilities come out as what codes are multiplied by, at
// most 2^8 (E4M3 has numbers from 2^-9 to 448), and the sum of weights takes it back a tile at a time.
// Tensor cores add products of 8 bits with some 14 bits, so that every tile's P V starts from zero and is
// added in float32.
#pragma once

#include <type_traits>

#include "kernels/cuda/attention/flash_schedule.cuh"
#include "millrace/kernels/tile/grid.cuh"
#include "millrace/kernels/tile/ptx/wgmma_e4m3.cuh"
#include "millrace/kernels/tile/ring.cuh"
#include "millrace/kernels/tile/warp.cuh"

namespace millrace::cuda {

// Tiles of kConsumers * 64 rows and kTileKeys keys; kStages of each of K and V. Head sizes up to kDim and
// kDimV: what is missing reads as zeros. One warpgroup is for few rows, whose time is that of loading keys.
// kBlocks: keys come by lists of blocks, of kRows queries each.
// kFlow: the first scores of an item are computed under the last P V of the one before, for items of few
// tiles. kWindowRows: of narrow windows, rows of keys that a stage holds. All keys of a tile's queries are
// one tile then, from an absolute multiple of 16 on, and each warpgroup takes the kKeys of them that its
// queries see.
template <class ElementType, int kHeadDim, int kValueDim, int kKeys, int kWarpgroups, int kDepth, bool kTurns,
          bool kBlocks = false, int kWindowRows = 0, bool kFlow = (kWindowRows > 0)>
struct FlashForwardConfig {
  using Element = ElementType;
  static constexpr bool kCodes = sizeof(Element) == 1;
  using Output = std::conditional_t<kCodes, __nv_bfloat16, Element>;
  static constexpr int kPart = ptx::kSwizzleRowBytes / static_cast<int>(sizeof(Element));
  static constexpr int kDim = kHeadDim, kDimV = kValueDim, kTileKeys = kKeys, kConsumers = kWarpgroups,
                       kStages = kDepth;
  static constexpr bool kTakeTurns = kTurns, kSparse = kBlocks, kWindow = kWindowRows > 0, kOverItems = kFlow;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kParts = (kDim + kPart - 1) / kPart, kPartsV = (kDimV + kPart - 1) / kPart;
  static constexpr int kThreads = (kConsumers + 1) * ptx::kWarpgroupThreads;
  static constexpr int kProducerRegisters = kConsumers != 2 ? 32 : kCodes ? 24 : 40;
  static constexpr int kConsumerRegisters = kConsumers != 2 ? 160 : kCodes ? 240 : 232;
  static constexpr int kQueryPartBytes = kRows * ptx::kSwizzleRowBytes;
  static constexpr int kKeyPartBytes = (kWindow ? kWindowRows : kTileKeys) * ptx::kSwizzleRowBytes;
  static constexpr int kKeyBytes = kParts * kKeyPartBytes;
  // Codes: a row for every dimension, of 128 keys.
  static constexpr int kValueBytes = kCodes ? kDimV * ptx::kSwizzleRowBytes : kPartsV * kKeyPartBytes;
  static constexpr int kQueryBytes = kParts * kQueryPartBytes;
  // Where they fit, the next item's queries are loaded while this one's keys are in use: with windows an item
  // is few tiles.
  static constexpr int kQueryStages =
      2 * kQueryBytes + kStages * (kKeyBytes + kValueBytes) <= 226 * 1024 ? 2 : 1;
  static constexpr int kKeysAt = kQueryStages * kQueryBytes, kValuesAt = kKeysAt + kStages * kKeyBytes;
  static constexpr int kBarriersAt = kValuesAt + kStages * kValueBytes;
  static constexpr int kItemSlots = 4;
  static constexpr int kBarriers = 4 * kStages + 2 * kQueryStages + 2 * kItemSlots;
  static constexpr int kItemsAt = kBarriersAt + kBarriers * 8;
  static constexpr int kTileKeysAt = kItemsAt + kItemSlots * 16;  // kSparse: where each stage's halves begin
  static constexpr int kSharedBytes = kTileKeysAt + (kSparse ? kStages * 8 : 0);
  static_assert(!kSparse || kTileKeys == 128);
  static_assert(!kCodes || (kTileKeys == kFlashScaleKeys && !kSparse));
  static_assert(kKeyPartBytes % 1024 == 0);
};

struct FlashForwardParams {
  CUtensorMap q, k, v;
  CUtensorMap k_ends, v_ends;  // paged: for boxes that a sequence's end cuts
  FlashShape shape;
  FlashSchedule schedule;
  FlashStrides out_strides;
  void* out;
  float* lse;           // or null
  int32_t value_dim;    // columns of out
  int32_t box_rows;     // of K and V
  int32_t pack;         // heads of a token that are rows of one tile: 1 or shape.group
  int32_t tile_tokens;  // kRows / pack
  int32_t window_rows;  // kWindow: of keys, that are loaded
  // Of splits of split_tiles tiles of keys each: out and log2 sums, [batch, heads,
  // max_q][splits]([value_dim]). Null: one split, into out and lse.
  int32_t split_tiles;
  // kSparse: see mr_flash_blocks.
  int32_t block_keys, block_rows;  // of keys; how many blocks of queries a head has
  const int32_t *block_starts, *block_columns;
  float *partial_out, *partial_lse;
  // kCodes: what mr_flash_problem has, how many blocks of keys a sequence has at most, and values by tiles
  // (flash_values.cuh).
  const float *q_scales, *k_scales, *v_scales;
  int32_t key_blocks;
  const uint8_t* value_tiles;
};

#ifdef MILLRACE_HAS_WGMMA

// The rings (millrace/kernels/tile/ring.cuh): keys and values, whose empty barriers every consumer warp
// arrives on, queries, and items, which the producer writes and consumers read.
template <class C>
struct FlashForwardRings {
  tile::RingBarriers<C::kStages> keys, values;
  tile::RingBarriers<C::kQueryStages> queries;
  tile::RingBarriers<C::kItemSlots> items;
};

// Barriers and buffers, as producer and consumers see them.
template <class C>
struct FlashForwardShared {
  using Rings = FlashForwardRings<C>;
  static_assert(sizeof(Rings) == C::kBarriers * 8);
  uint8_t* base;
  __device__ Rings& rings() const { return *reinterpret_cast<Rings*>(base + C::kBarriersAt); }
  template <bool kValues>
  __device__ tile::RingBarriers<C::kStages>& ring() const {
    return kValues ? rings().values : rings().keys;
  }
  __device__ uint8_t* queries(uint32_t n) const { return base + n % C::kQueryStages * C::kQueryBytes; }
  __device__ int4* item(uint32_t n) const {
    return reinterpret_cast<int4*>(base + C::kItemsAt) + n % C::kItemSlots;
  }
  // Where the first 64 and the last 64 keys of the tile begin.
  __device__ int2* tile_keys(uint32_t n) const {
    return reinterpret_cast<int2*>(base + C::kTileKeysAt) + n % C::kStages;
  }
  __device__ uint8_t* keys(uint32_t n) const { return base + C::kKeysAt + n % C::kStages * C::kKeyBytes; }
  __device__ uint8_t* values(uint32_t n) const {
    return base + C::kValuesAt + n % C::kStages * C::kValueBytes;
  }

  __device__ void init() const {
    constexpr uint32_t kWarps = C::kConsumers * ptx::kWarpgroupWarps;
    rings().keys.init(kWarps);
    rings().values.init(kWarps);
    rings().queries.init(kWarps);
    rings().items.init(kWarps);
  }
};

// Tiles of keys that the tile's queries see, of its split; of lists of blocks, how many tiles the blocks
// fill.
template <class C>
struct FlashKeyTiles {
  int32_t first, past;
  int32_t begin = 0;  // kWindow: of the tile's keys
  const int32_t* columns = nullptr;
  int32_t count = 0;  // of columns

  __device__ FlashKeyTiles(const FlashForwardParams& p, const FlashSequence& seq,
                           const FlashSchedule::Item& at) {
    if constexpr (C::kSparse) {
      const int64_t list = (int64_t{at.b} * p.shape.heads + at.head) * p.block_rows + at.tile;
      const int32_t begin = p.block_starts[list];
      columns = p.block_columns + begin;
      count = p.block_starts[list + 1] - begin;
      if (seq.k_len == 0) count = 0;
      first = 0, past = p.block_keys == 64 ? (count + 1) / 2 : count;
      return;
    }
    const int32_t query = at.tile * p.tile_tokens, last = min(query + p.tile_tokens, seq.q_len) - 1;
    const int32_t past_key = seq.past_key(p.shape, last), first_key = seq.first_key(p.shape, query);
    if constexpr (C::kWindow) {
      first = 0, past = past_key > first_key ? 1 : 0, begin = first_key & ~15;
      return;
    }
    past = past_key > first_key ? (past_key + C::kTileKeys - 1) / C::kTileKeys : 0;
    first = first_key / C::kTileKeys;
    if (p.partial_out != nullptr) {
      first = max(first, at.split * p.split_tiles), past = min(past, (at.split + 1) * p.split_tiles);
    }
    first = min(first, past);
  }
  // kSparse: where the halves of the tile begin; past the last block, where nobody looks.
  __device__ int2 halves(const FlashForwardParams& p, int32_t tile) const {
    if (p.block_keys != 64) return {columns[tile] * 128, columns[tile] * 128 + 64};
    return {columns[2 * tile] * 64, 2 * tile + 1 < count ? columns[2 * tile + 1] * 64 : kFlashOpen / 2};
  }
};

// One warp: all lanes wait, lane i copies box i.
template <class C>
class FlashForwardProducer {
  using Round = tile::Cursor<C::kStages>;

 public:
  __device__ FlashForwardProducer(const FlashForwardParams& p, uint8_t* shared)
      : p_(p), shared_{shared}, lane_(static_cast<int32_t>(threadIdx.x % kWarpLanes)) {}

  __device__ void run() {
    const int32_t items = p_.schedule.items(p_.shape);
    const tile::WorkQueue queue{p_.schedule.counter};
    int32_t item = queue.first();
    for (uint32_t round = 0;; ++round) {
      // On its way while this item's tiles are loaded. Items of narrow windows are alike.
      int32_t next = item + static_cast<int32_t>(gridDim.x);
      if (!C::kWindow && lane_ == 0) next = queue.next();
      const bool has = item < items;
      const FlashSchedule::Item at = has ? p_.schedule.at(p_.shape, item) : FlashSchedule::Item{-1, 0, 0, 0};
      const auto slot = tile::Cursor<C::kItemSlots>::at(round);
      shared_.rings().items.wait_empty(slot);
      if (lane_ == 0) {
        *shared_.item(round) = {at.b, at.head, at.tile, at.split};
        ptx::barrier_arrive(shared_.rings().items.full + slot.stage);
      }
      if (!has) return;
      load_item(at);
      item = C::kWindow ? next : __shfl_sync(kAllLanes, next, 0);
    }
  }

 private:
  __device__ void load_item(const FlashSchedule::Item& at) {
    const FlashShape& s = p_.shape;
    const FlashSequence seq(s, at.b);
    const FlashKeyTiles<C> tiles(p_, seq, at);
    if (tiles.past == tiles.first) return;
    load_queries(seq, at);
    const int32_t kv_head = p_.pack > 1 ? at.head : at.head / s.group;
    for (int32_t tile = tiles.past - 1; tile >= tiles.first; --tile) {
      load_tile<false>(seq, at.b, kv_head, tiles, tile, n_keys_);
      ++n_keys_;
      if (tile + 1 < tiles.past) load_tile<true>(seq, at.b, kv_head, tiles, tile + 1, n_values_++);
    }
    load_tile<true>(seq, at.b, kv_head, tiles, tiles.first, n_values_++);
  }

  __device__ void load_queries(const FlashSequence& seq, const FlashSchedule::Item& at) {
    const FlashShape& s = p_.shape;
    const uint32_t n = n_queries_++;
    const auto stage = tile::Cursor<C::kQueryStages>::at(n);
    uint64_t* full = shared_.rings().queries.full + stage.stage;
    shared_.rings().queries.wait_empty(stage);
    if (lane_ == 0) ptx::barrier_arrive_expect(full, C::kQueryBytes);
    __syncwarp();
    if (lane_ >= C::kParts) return;
    const FlashRows rows = flash_rows(s.cu_q != nullptr, s.max_q, seq.q_start, seq.q_len, at.head, at.b);
    const int32_t row = rows.row + at.tile * p_.tile_tokens;
    const bool packed = p_.pack > 1;
    ptx::tma_load_5d(shared_.queries(n) + lane_ * C::kQueryPartBytes, &p_.q, lane_ * C::kPart,
                     packed ? 0 : row, packed ? row : rows.c2, packed ? rows.c2 : rows.c3,
                     packed ? rows.c3 : 0, full);
  }

  template <bool kValues>
  __device__ void load_tile(const FlashSequence& seq, int32_t b, int32_t kv_head,
                            const FlashKeyTiles<C>& tiles, int32_t tile, uint32_t n) {
    constexpr int kParts = kValues ? C::kPartsV : C::kParts;
    const FlashShape& s = p_.shape;
    const CUtensorMap* map = kValues ? &p_.v : &p_.k;
    auto& ring = shared_.template ring<kValues>();
    uint64_t* full = ring.full + Round::at(n).stage;
    uint8_t* stage = kValues ? shared_.values(n) : shared_.keys(n);
    ring.wait_empty(Round::at(n));
    if constexpr (C::kSparse) {
      const int2 halves = tiles.halves(p_, tile);
      if (lane_ == 0) {
        if (!kValues) *shared_.tile_keys(n) = halves;
        ptx::barrier_arrive_expect(full, kParts * C::kKeyPartBytes);
      }
      __syncwarp();
      if (lane_ >= 2 * kParts) return;
      const int32_t part = lane_ / 2, half = lane_ % 2;
      // What is past the end is hidden by the mask: keys that exist stand in for it.
      const int32_t key = half == 0 ? halves.x : halves.y;
      const FlashRows rows = flash_rows(s.cu_k != nullptr, s.max_k, seq.k_start, seq.k_len, kv_head, b);
      ptx::tma_load_5d(stage + part * C::kKeyPartBytes + half * 64 * ptx::kSwizzleRowBytes, map,
                       part * C::kPart, rows.row + (key < seq.k_len ? key : 0), rows.c2, rows.c3, 0, full);
      return;
    }
    if (lane_ == 0) {
      ptx::barrier_arrive_expect(full, C::kWindow ? kParts * p_.window_rows * ptx::kSwizzleRowBytes
                                       : kValues  ? C::kValueBytes
                                                  : C::kKeyBytes);
    }
    if constexpr (C::kCodes && kValues) {
      if (lane_ != 0) return;
      const int64_t at = (int64_t{b} * s.kv_heads + kv_head) * p_.key_blocks + tile;
      ptx::bulk_copy_kept(stage, p_.value_tiles + at * C::kValueBytes, C::kValueBytes, full);
      return;
    }
    __syncwarp();
    if (s.pages == nullptr) {
      if (lane_ >= kParts) return;
      const FlashRows rows = flash_rows(s.cu_k != nullptr, s.max_k, seq.k_start, seq.k_len, kv_head, b);
      ptx::tma_load_5d(stage + lane_ * C::kKeyPartBytes, map, lane_ * C::kPart,
                       rows.row + (C::kWindow ? tiles.begin : tile * C::kTileKeys), rows.c2, rows.c3, 0,
                       full);
      return;
    }
    const CUtensorMap* ends = kValues ? &p_.v_ends : &p_.k_ends;
    const int32_t boxes = C::kTileKeys / p_.box_rows;
    for (int32_t i = lane_; i < boxes * kParts; i += kWarpLanes) {
      const int32_t part = i / boxes, row = i % boxes * p_.box_rows, key = tile * C::kTileKeys + row;
      const int32_t rows = max(0, min(p_.box_rows, seq.k_len - key)), column = part * C::kPart;
      uint8_t* to = stage + part * C::kKeyPartBytes + row * ptx::kSwizzleRowBytes;
      if (rows == 0) {  // zeros: past the end of any page
        ptx::tma_load_5d(to, map, column, s.page_tokens, 0, kv_head, 0, full);
        continue;
      }
      const int32_t page = s.pages[b * s.pages_stride + key / s.page_tokens], in_page = key % s.page_tokens;
      if (rows == p_.box_rows) {
        ptx::tma_load_5d(to, map, column, in_page, page, kv_head, 0, full);
      } else {
        ptx::tma_load_5d(to, ends, column, p_.box_rows - rows, in_page + rows, page, kv_head, full);
      }
    }
  }

  const FlashForwardParams& p_;
  const FlashForwardShared<C> shared_;
  const int32_t lane_;
  uint32_t n_queries_ = 0, n_keys_ = 0, n_values_ = 0;
};

#endif  // MILLRACE_HAS_WGMMA

}  // namespace millrace::cuda
