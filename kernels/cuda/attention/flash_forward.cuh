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
template <class ElementType, int kHeadDim, int kValueDim, int kKeys, int kWarpgroups, int kDepth, bool kTurns,
          bool kBlocks = false>
struct FlashForwardConfig {
  using Element = ElementType;
  static constexpr bool kCodes = sizeof(Element) == 1;
  using Output = std::conditional_t<kCodes, __nv_bfloat16, Element>;
  static constexpr int kPart = ptx::kSwizzleRowBytes / static_cast<int>(sizeof(Element));
  static constexpr int kDim = kHeadDim, kDimV = kValueDim, kTileKeys = kKeys, kConsumers = kWarpgroups,
                       kStages = kDepth;
  static constexpr bool kTakeTurns = kTurns, kSparse = kBlocks;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kParts = (kDim + kPart - 1) / kPart, kPartsV = (kDimV + kPart - 1) / kPart;
  static constexpr int kThreads = (kConsumers + 1) * ptx::kWarpgroupThreads;
  static constexpr int kProducerRegisters = kConsumers != 2 ? 32 : kCodes ? 24 : 40;
  static constexpr int kConsumerRegisters = kConsumers != 2 ? 160 : kCodes ? 240 : 232;
  static constexpr int kQueryPartBytes = kRows * ptx::kSwizzleRowBytes;
  static constexpr int kKeyPartBytes = kTileKeys * ptx::kSwizzleRowBytes;
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
  static constexpr int kItemSlots = 2;
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
      // On its way while this item's tiles are loaded.
      int32_t next = 0;
      if (lane_ == 0) next = queue.next();
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
      item = __shfl_sync(kAllLanes, next, 0);
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
    if (lane_ == 0) ptx::barrier_arrive_expect(full, kValues ? C::kValueBytes : C::kKeyBytes);
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
                       rows.row + tile * C::kTileKeys, rows.c2, rows.c3, 0, full);
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

// A warpgroup's 64 rows. Lane (g, t) of warp w has rows 16w + g and 16w + g + 8, of a tile's scores columns
// 8j + 2t and + 1.
template <class C>
class FlashForwardConsumer {
  using Element = typename C::Element;
  using Round = tile::Cursor<C::kStages>;
  using QueryRound = tile::Cursor<C::kQueryStages>;
  // A product has 32 bytes of depth.
  static constexpr int kDepth = 32 / static_cast<int>(sizeof(Element));
  static constexpr int kScores = C::kTileKeys / 2, kSums = C::kDimV / 2, kSteps = C::kTileKeys / kDepth;
  static constexpr float kShift = C::kCodes ? 8.0f : 0.0f;  // log2 of what a row's largest probability is

 public:
  __device__ FlashForwardConsumer(const FlashForwardParams& p, uint8_t* shared)
      : p_(p),
        shared_{shared},
        warpgroup_(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / ptx::kWarpgroupThreads), 0)) {}

  __device__ __forceinline__ void run() {
    if (C::kTakeTurns && warpgroup_ == 1) pass_turn();  // the first turn is warpgroup 0's
    for (uint32_t round = 0;; ++round) {
      const auto slot = tile::Cursor<C::kItemSlots>::at(round);
      shared_.rings().items.wait_full(slot);
      const int4 item = *shared_.item(round);
      __syncwarp();  // all lanes have read it
      leave(shared_.rings().items, slot);
      if (item.x < 0) return;
      run_item({item.x, item.y, item.z, item.w});
    }
  }

 private:
  // This warp has read it.
  template <class Ring>
  __device__ static void leave(Ring& ring, typename Ring::Cursor at) {
    if (threadIdx.x % kWarpLanes == 0) ring.release(at);
  }
  __device__ auto& key_ring() const { return shared_.rings().keys; }
  __device__ auto& value_ring() const { return shared_.rings().values; }
  // Barriers 1 and 2: a warpgroup waits for its own, and the other one lets it go on.
  __device__ void wait_turn() const {
    if constexpr (C::kTakeTurns) ptx::named_barrier<2 * ptx::kWarpgroupThreads>(1 + warpgroup_);
  }
  __device__ void pass_turn() const {
    if constexpr (C::kTakeTurns) ptx::named_arrive<2 * ptx::kWarpgroupThreads>(2 - warpgroup_);
  }

  __device__ __forceinline__ void run_item(const FlashSchedule::Item& at) {
    const FlashSequence seq(p_.shape, at.b);
    const FlashKeyTiles<C> tiles(p_, seq, at);
    begin_rows(seq, at);
    if constexpr (C::kCodes) begin_scales(seq, at);
    float acc[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) acc[i] = 0.0f;
    if (tiles.past > tiles.first) {
      shared_.rings().queries.wait_full(QueryRound::at(n_queries_));
      if constexpr (C::kCodes) {
        mainloop_of_codes(tiles, acc);
      } else {
        mainloop(tiles, acc);
      }
      ++n_queries_;
    }
    p_.partial_out != nullptr ? store_partial(seq, at, acc) : store(seq, at, acc);
  }

  __device__ __forceinline__ void begin_rows(const FlashSequence& seq, const FlashSchedule::Item& item) {
    const int32_t first = item.tile * p_.tile_tokens,
                  thread = static_cast<int32_t>(threadIdx.x % ptx::kWarpgroupThreads);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t row = warpgroup_ * 64 + thread / kWarpLanes * 16 + thread % kWarpLanes / 4 + 8 * r;
      query_[r] = first + row / p_.pack;
      first_key_[r] = seq.first_key(p_.shape, query_[r]);
      past_key_[r] = seq.past_key(p_.shape, query_[r]);
      row_max_[r] = -INFINITY, row_sum_[r] = 0.0f;
    }
    // Keys that all 64 rows see.
    whole_first_ = seq.first_key(p_.shape, first + (warpgroup_ * 64 + 63) / p_.pack);
    whole_past_ = seq.past_key(p_.shape, first + warpgroup_ * 64 / p_.pack);
  }

  __device__ __forceinline__ void mainloop(const FlashKeyTiles<C>& tiles, float (&acc)[kSums]) {
    float score[kScores], alpha[2];
    uint32_t prob[kSteps][4];
    key_ring().wait_full(Round::at(n_));
    multiply_qk(n_, score);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(score);
    const int2 keys = keys_of(tiles.past - 1, n_);
    leave(key_ring(), Round::at(n_));
    softmax(keys, score, alpha);
    round_probs(score, prob);
    for (int32_t tile = tiles.past - 2; tile >= tiles.first; --tile) {
      key_ring().wait_full(Round::at(n_ + 1));
      wait_turn();
      ptx::fence_registers(acc);
      multiply_qk(n_ + 1, score);
      value_ring().wait_full(Round::at(n_));
      multiply_pv(prob, acc);
      pass_turn();
      ptx::wgmma_wait<1>();
      ptx::fence_registers(score);
      const int2 next = keys_of(tile, n_ + 1);
      leave(key_ring(), Round::at(n_ + 1));
      softmax(next, score, alpha);
      // Here, since the assembler would have the softmax wait for P V.
      ptx::fence_registers(score);
      ptx::wgmma_wait<0>();
      ptx::fence_registers(acc);
      ptx::fence_registers(prob);
      leave(value_ring(), Round::at(n_));
      ++n_;
      round_probs(score, prob);
      rescale(alpha, acc);
    }
    leave(shared_.rings().queries, QueryRound::at(n_queries_));
    value_ring().wait_full(Round::at(n_));
    ptx::fence_registers(acc);
    multiply_pv(prob, acc);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(acc);
    ptx::fence_registers(prob);
    leave(value_ring(), Round::at(n_));
    ++n_;
  }

  __device__ __forceinline__ void begin_scales(const FlashSequence& seq, const FlashSchedule::Item& at) {
    const FlashShape& s = p_.shape;
    const int32_t kv_head = p_.pack > 1 ? at.head : at.head / s.group;
    const int64_t blocks = (int64_t{at.b} * s.kv_heads + kv_head) * p_.key_blocks;
    k_scales_ = p_.k_scales + blocks, v_scales_ = p_.v_scales + blocks;
    const int64_t first = s.cu_q != nullptr ? seq.q_start : int64_t{at.b} * s.max_q;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      q_factor_[r] = s.scale_log2;
      if (query_[r] < seq.q_len) q_factor_[r] *= p_.q_scales[(first + query_[r]) * s.heads + head_of(at, r)];
    }
  }

  // As mainloop, but every tile's P V has sums of its own.
  __device__ __forceinline__ void mainloop_of_codes(const FlashKeyTiles<C>& tiles, float (&acc)[kSums]) {
    float score[kScores], part[kSums], alpha[2];
    uint32_t prob[kSteps][4];
    float2 scales = scales_of(tiles.past - 1);
    key_ring().wait_full(Round::at(n_));
    multiply_qk(n_, score);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(score);
    leave(key_ring(), Round::at(n_));
    softmax_of_codes((tiles.past - 1) * C::kTileKeys, scales, score, alpha);
    round_probs(score, prob);
    for (int32_t tile = tiles.past - 2; tile >= tiles.first; --tile) {
      scales = scales_of(tile);
      key_ring().wait_full(Round::at(n_ + 1));
      wait_turn();
      multiply_qk(n_ + 1, score);
      value_ring().wait_full(Round::at(n_));
      multiply_pv(prob, part);
      pass_turn();
      ptx::wgmma_wait<1>();
      ptx::fence_registers(score);
      leave(key_ring(), Round::at(n_ + 1));
      float next[2];
      softmax_of_codes(tile * C::kTileKeys, scales, score, next);
      ptx::fence_registers(score);
      ptx::wgmma_wait<0>();
      ptx::fence_registers(part);
      ptx::fence_registers(prob);
      leave(value_ring(), Round::at(n_));
      ++n_;
      round_probs(score, prob);
      add_part(alpha, part, acc);
      alpha[0] = next[0], alpha[1] = next[1];
    }
    leave(shared_.rings().queries, QueryRound::at(n_queries_));
    value_ring().wait_full(Round::at(n_));
    multiply_pv(prob, part);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(part);
    ptx::fence_registers(prob);
    leave(value_ring(), Round::at(n_));
    ++n_;
    add_part(alpha, part, acc);
  }
  __device__ __forceinline__ static void add_part(const float (&alpha)[2], const float (&part)[kSums],
                                                  float (&acc)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) acc[i] = fmaf(acc[i], alpha[i / 2 % 2], part[i]);
  }
  // Of the tile's keys and values.
  __device__ __forceinline__ float2 scales_of(int32_t tile) const {
    return {__ldg(k_scales_ + tile), __ldg(v_scales_ + tile)};
  }

  // Where the tile's keys begin, and of a list its second half.
  __device__ __forceinline__ int2 keys_of(int32_t tile, uint32_t n) const {
    if constexpr (!C::kSparse) return {tile * C::kTileKeys, 0};
    const int2 halves = *shared_.tile_keys(n);
    __syncwarp();  // all lanes have read it
    return halves;
  }
  // Most tiles bring no row of the warp a new maximum.
  __device__ __forceinline__ static void rescale(const float (&alpha)[2], float (&acc)[kSums]) {
    if (!__any_sync(kAllLanes, alpha[0] != 1.0f || alpha[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kSums; ++i) acc[i] *= alpha[i / 2 % 2];
  }

  __device__ __forceinline__ void multiply_qk(uint32_t n, float (&score)[kScores]) const {
    const uint64_t a = ptx::wgmma_operand(shared_.queries(n_queries_) +
                                          warpgroup_ * 64 * ptx::kSwizzleRowBytes),
                   b = ptx::wgmma_operand(shared_.keys(n));
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < C::kDim / kDepth; ++s) {
      const uint64_t rows = a + s / 4 * (C::kQueryPartBytes / 16) + s % 4 * 2,
                     keys = b + s / 4 * (C::kKeyPartBytes / 16) + s % 4 * 2;
      if constexpr (C::kCodes) {
        ptx::wgmma_e4m3(score, rows, keys, s > 0);
      } else {
        ptx::wgmma_16bit<Element, 0, 0>(score, rows, keys, s > 0);
      }
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void multiply_pv(const uint32_t (&prob)[kSteps][4], float (&acc)[kSums]) const {
    const uint64_t b = C::kCodes ? ptx::wgmma_operand(shared_.values(n_))
                                 : ptx::wgmma_transposed_operand(shared_.values(n_), C::kKeyPartBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if constexpr (C::kCodes) {
        ptx::wgmma_e4m3(acc, prob[s], b + s * 2, s > 0);
      } else {
        ptx::wgmma_16bit<Element, 1>(acc, prob[s], b + s * (16 * ptx::kSwizzleRowBytes / 16), true);
      }
    }
    ptx::wgmma_commit();
  }

  // Scores become probabilities; alpha: by what accumulators are rescaled. row_max_: log2.
  __device__ __forceinline__ void softmax(const int2& keys, float (&score)[kScores], float (&alpha)[2]) {
    const FlashShape& s = p_.shape;
    float factor = s.scale_log2;
    if (s.softcap > 0.0f || factor < 0.0f) {
      if (s.softcap > 0.0f) {
        const float out = s.softcap * kFlashLog2e, in = factor / out;
#pragma unroll
        for (int i = 0; i < kScores; ++i) score[i] = out * flash_tanh(score[i] * in);
      } else {
#pragma unroll
        for (int i = 0; i < kScores; ++i) score[i] *= factor;
      }
      factor = 1.0f;
    }
    const int32_t last = C::kSparse ? keys.y + 64 : keys.x + C::kTileKeys;  // blocks ascend
    if (keys.x < whole_first_ || last > whole_past_) mask(keys, score);
    float tile_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kScores; ++i) tile_max[i / 2 % 2] = fmaxf(tile_max[i / 2 % 2], score[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float new_max = fmaxf(row_max_[r], tile::quad_max(tile_max[r]) * factor);
      const float base = new_max == -INFINITY ? 0.0f : new_max;
      alpha[r] = ptx::exp2_approx(row_max_[r] - base);
      row_max_[r] = new_max;
      float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
        float* p = score + 4 * j + 2 * r;
        p[0] = ptx::exp2_approx(fmaf(p[0], factor, -base));
        p[1] = ptx::exp2_approx(fmaf(p[1], factor, -base));
        sums[j % 2 * 2] += p[0], sums[j % 2 * 2 + 1] += p[1];
      }
      row_sum_[r] = fmaf(row_sum_[r], alpha[r], (sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
  }
  // The same of codes; scales: of the tile's keys and values. Probabilities are times 2^kShift and the
  // values' scale, over the largest of them; row_max_ is the log2 of that, row_sum_ times 2^kShift.
  __device__ __forceinline__ void softmax_of_codes(int32_t key, const float2& scales, float (&score)[kScores],
                                                   float (&alpha)[2]) {
    const FlashShape& s = p_.shape;
    // Not zero, which would make NaN of what is hidden.
    float factor[2] = {q_factor_[0] * scales.x, q_factor_[1] * scales.x};
    if (s.softcap > 0.0f || s.scale_log2 < 0.0f) {
      const float out = s.softcap * kFlashLog2e;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        score[i] *= factor[i / 2 % 2];
        if (s.softcap > 0.0f) score[i] = out * flash_tanh(score[i] / out);
      }
      factor[0] = factor[1] = 1.0f;
    }
    if (key < whole_first_ || key + C::kTileKeys > whole_past_) mask(int2{key, 0}, score);
    const float value_log2 = fmaxf(log2f(scales.y), -120.0f), inverse = ptx::exp2_approx(-value_log2);
    float tile_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kScores; ++i) tile_max[i / 2 % 2] = fmaxf(tile_max[i / 2 % 2], score[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float by = fmaxf(factor[r], 1e-37f);
      const float new_max = fmaxf(row_max_[r], fmaf(tile::quad_max(tile_max[r]), by, value_log2));
      const float base = new_max == -INFINITY ? 0.0f : new_max, from = base - value_log2 - kShift;
      alpha[r] = ptx::exp2_approx(row_max_[r] - base);
      row_max_[r] = new_max;
      float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
        float* p = score + 4 * j + 2 * r;
        p[0] = ptx::exp2_approx(fmaf(p[0], by, -from));
        p[1] = ptx::exp2_approx(fmaf(p[1], by, -from));
        sums[j % 2 * 2] += p[0], sums[j % 2 * 2 + 1] += p[1];
      }
      row_sum_[r] = fmaf(row_sum_[r], alpha[r], ((sums[0] + sums[1]) + (sums[2] + sums[3])) * inverse);
    }
  }
  __device__ __forceinline__ void mask(const int2& keys, float (&score)[kScores]) const {
    const int32_t in_eight = static_cast<int32_t>(threadIdx.x % 4 * 2), from = keys.x + in_eight;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int32_t low = first_key_[r] - from, past = past_key_[r] - from;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        const int column = i / 2 * 8 + i % 2;
        if (C::kSparse && column == 64) {
          low = first_key_[r] - (keys.y - 64 + in_eight), past = past_key_[r] - (keys.y - 64 + in_eight);
        }
        float& s = score[i / 2 * 4 + 2 * r + i % 2];
        s = column >= low && column < past ? s : -INFINITY;
      }
    }
  }
  __device__ __forceinline__ static void round_probs(const float (&score)[kScores],
                                                     uint32_t (&prob)[kSteps][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) {
      if constexpr (C::kCodes) {  // of 16 keys a lane has 2t, 2t + 1, 2t + 8, 2t + 9: the order of values
        const float* p = score + i / 2 * 8 + i % 2 * 2;
        prob[i / 4][i % 4] = ptx::pack_e4m3(p[0], p[1], p[4], p[5]);
      } else {
        prob[i / 4][i % 4] = flash_pack<Element>(score[2 * i], score[2 * i + 1]);
      }
    }
  }

  // The head of this lane's row r: where rows are packed, they go over the heads of a token.
  __device__ int32_t head_of(const FlashSchedule::Item& at, int r) const {
    if (p_.pack == 1) return at.head;
    const auto thread = static_cast<int32_t>(threadIdx.x % ptx::kWarpgroupThreads);
    const int32_t row = warpgroup_ * 64 + thread / kWarpLanes * 16 + thread % kWarpLanes / 4 + 8 * r;
    return at.head * p_.pack + row % p_.pack;
  }

  // The sink joins, out and lse are stored: a lane has eight columns of every 32.
  __device__ __forceinline__ void store(const FlashSequence& seq, const FlashSchedule::Item& at,
                                        const float (&acc)[kSums]) const {
    const FlashShape& s = p_.shape;
    const int t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t head = head_of(at, r);
      const float sink = s.sinks != nullptr ? __ldg(s.sinks + head) * kFlashLog2e : -INFINITY;
      const float row_max = row_max_[r] - kShift;
      const float all = fmaxf(row_max, sink), base = all == -INFINITY ? 0.0f : all;
      const float mine = ptx::exp2_approx(row_max - base);
      const float sum = fmaf(tile::quad_sum(row_sum_[r]), mine, ptx::exp2_approx(sink - base));
      const float inverse = sum > 0.0f ? mine / sum : sum == 0.0f ? 0.0f : sum;
      const bool stored = query_[r] < seq.q_len;
      if (p_.lse != nullptr && stored && t == 0) {
        p_.lse[flash_lse_at(s, at.b, seq.q_start, head) + query_[r]] =
            sum == 0.0f ? -INFINITY : fmaf(base, kFlashLn2, logf(sum));
      }
      auto* out = static_cast<typename C::Output*>(p_.out) +
                  flash_row_at(p_.out_strides, at.b, seq.q_start, query_[r], head);
#pragma unroll
      for (int i = 0; i < C::kDimV / 32; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* x = acc + 16 * i + 4 * j + 2 * r;
          words[j] = flash_pack<typename C::Output>(x[0] * inverse, x[1] * inverse);
        }
        flash_quad_transpose(words);
        if (stored && 32 * i + 8 * t < p_.value_dim) {
          *reinterpret_cast<uint4*>(out + 32 * i + 8 * t) = uint4{words[0], words[1], words[2], words[3]};
        }
      }
    }
  }

  // Of a split: out before the sink joins, and the log2 of its sum.
  __device__ __forceinline__ void store_partial(const FlashSequence& seq, const FlashSchedule::Item& at,
                                                const float (&acc)[kSums]) const {
    const FlashShape& s = p_.shape;
    const int t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = tile::quad_sum(row_sum_[r]), inverse = sum > 0.0f ? 1.0f / sum : sum;
      if (query_[r] >= seq.q_len) continue;
      const int64_t row = (int64_t{at.b} * s.heads + head_of(at, r)) * s.max_q + query_[r];
      const int64_t to = row * p_.schedule.splits + at.split;
      if (t == 0) {
        p_.partial_lse[to] = sum == 0.0f ? -INFINITY : row_max_[r] - kShift + log2f(sum);
      }
      if (sum == 0.0f) continue;
      float* out = p_.partial_out + to * p_.value_dim + 2 * t;
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        if (8 * i < p_.value_dim) {
          *reinterpret_cast<float2*>(out + 8 * i) = {acc[4 * i + 2 * r] * inverse,
                                                     acc[4 * i + 2 * r + 1] * inverse};
        }
      }
    }
  }

  const FlashForwardParams& p_;
  const FlashForwardShared<C> shared_;
  const int warpgroup_;
  uint32_t n_ = 0, n_queries_ = 0;  // tiles and items with tiles so far
  int32_t query_[2], first_key_[2], past_key_[2];
  int32_t whole_first_, whole_past_;
  float row_max_[2], row_sum_[2];  // row_sum_ is this lane's part
  // kCodes: a row's scale times that of scores, and those of the sequence's blocks of keys.
  float q_factor_[2];
  const float *k_scales_, *v_scales_;
};

#endif  // MILLRACE_HAS_WGMMA

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    flash_forward_kernel(const __grid_constant__ FlashForwardParams p) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  if (threadIdx.x == 0) FlashForwardShared<C>{shared}.init();
  __syncthreads();  // the barriers are there
  if (threadIdx.x < C::kConsumers * ptx::kWarpgroupThreads) {
    if constexpr (C::kConsumers > 1) ptx::more_registers<C::kConsumerRegisters>();
    FlashForwardConsumer<C>(p, shared).run();
  } else {
    if constexpr (C::kConsumers > 1) ptx::fewer_registers<C::kProducerRegisters>();
    if (threadIdx.x / kWarpLanes == C::kConsumers * ptx::kWarpgroupWarps)
      FlashForwardProducer<C>(p, shared).run();
  }
#else
  __trap();
#endif
}

}  // namespace millrace::cuda
