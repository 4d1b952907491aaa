// The backward kernel on Hopper's warpgroup products. See docs/kernels/cuda_flash_attention.md.
//
// A CTA has 128 keys of one KV head, 64 of each of two consumer warpgroups, and goes over the queries that
// see them, of all heads of the group one after the other, so that dK and dV stay in registers and are added
// in a fixed order. Everything is transposed, [keys, queries], so that probabilities and their gradients are
// A operands as they come out of the products before:
//     S^T = K Q^T      dP^T = V dO^T      P^T = exp2(S^T - lse)      dS^T = P^T (dP^T - D)
//     dV += P^T dO     dK += dS^T Q       dQ = dS K (over both warpgroups' keys, dS through shared memory)
// dQ of a tile of queries is added to float32 in the workspace by the copy engine, in tickets' order where
// the call is deterministic: a counter per tile says who is next. A CTA takes its ticket when it starts and
// waits only for tickets before its own, which have started.
//
// A producer warp loads; two others add dQ, of every second step each: an addition and its turn take longer
// than a step.
//
// Lists of blocks say for queries which keys they see. The producer looks a CTA's keys up in the lists of 32
// blocks of queries at once, a lane each, and leaves beside each stage what the step is. CTAs come to a tile
// of queries at random times, so that turns would have them wait. Deterministic calls add dQ in fixed point
// instead, whose sums do not depend on their order: a row's and a column's power of two bound it.
#pragma once

#include <algorithm>

#include "kernels/cuda/attention/flash_schedule.cuh"
#include "millrace/kernels/tile/ptx/bulk_reduce.cuh"

namespace millrace::cuda {

inline constexpr int kFlashBackwardKeys = 128, kFlashBackwardConsumers = 2;

// Tiles of kTileQueries; head sizes up to kPaddedDim, the rest reads as zeros. kSoftcap: scores are capped.
template <class ElementType, int kPaddedDim, int kTileQueries, bool kSoftcap, bool kBlocks = false>
struct FlashBackwardConfig {
  using Element = ElementType;
  static constexpr bool kCapped = kSoftcap, kSparse = kBlocks;
  // dS from probabilities that have been rounded for dV: their float32 would not fit the registers.
  static constexpr bool kRoundedProbs = kTileQueries == 128 && !kCapped;
  static constexpr int kDim = kPaddedDim, kQueries = kTileQueries, kKeys = kFlashBackwardKeys, kStages = 2;
  static constexpr int kParts = kDim / kFlashPart;
  static constexpr int kThreads = (kFlashBackwardConsumers + 1) * ptx::kWarpgroupThreads;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  // dQ of a tile: each warpgroup has 64 rows of all columns, or, of 64 queries, half of the columns.
  static constexpr int kDqColumns = kQueries == 64 ? kDim / 2 : kDim;
  static constexpr int kDqFloats = kQueries * kDim;
  static constexpr int kQueryPartBytes = kQueries * ptx::kSwizzleRowBytes,
                       kQueryBytes = kParts * kQueryPartBytes;
  static constexpr int kKeyPartBytes = kKeys * ptx::kSwizzleRowBytes, kKeyBytes = kParts * kKeyPartBytes;
  static constexpr int kDsBytes = kQueries / 64 * kKeyPartBytes;
  static constexpr int kRowBytes = kQueries * static_cast<int>(sizeof(float));
  static constexpr int kValuesAt = kKeyBytes, kQueriesAt = 2 * kKeyBytes;
  static constexpr int kGradientsAt = kQueriesAt + kStages * kQueryBytes;  // dO
  static constexpr int kDsAt = kGradientsAt + kStages * kQueryBytes;
  static constexpr int kDqAt = kDsAt + 2 * kDsBytes;
  static constexpr int kLseAt = kDqAt + 2 * kDqFloats * 4, kDeltaAt = kLseAt + kStages * kRowBytes;
  static constexpr int kBarriersAt = kDeltaAt + kStages * kRowBytes;
  static constexpr int kBarriers = 4 * kStages + 5;
  static constexpr int kItemAt = kBarriersAt + kBarriers * 8 + 8;
  // kSparse: steps, of which a slot is written again long after everybody has read it; factors of fixed
  // point.
  static constexpr int kStepSlots = 8, kStepsAt = kItemAt + 16;
  static constexpr int kRowFactorsAt = kStepsAt + kStepSlots * 16,
                       kColumnFactorsAt = kRowFactorsAt + kStages * kQueries;
  static constexpr int kSharedBytes = kSparse ? kColumnFactorsAt + kDim * 4 : kStepsAt;
  static_assert(kSharedBytes <= 227 * 1024);
  static_assert(kItemAt % 16 == 0 && (kQueries == 64 || kQueries == 128));
};

struct FlashBackwardParams {
  CUtensorMap q, k, v, d_out;
  FlashShape shape;
  FlashSchedule schedule;
  int32_t head_dim, value_dim;
  bool ascending;            // tickets from the first keys on
  const float *lse, *delta;  // [batch, heads, query_tiles * kQueries]: lse log2 e, rowsum(dO * O)
  float* dq;                 // [batch, heads, query_tiles][kDqFloats], in the order of fragments
  int32_t* turns;            // [batch, heads, query_tiles]: how many have added; null: any order
  int32_t query_tiles;
  FlashStrides dk_strides, dv_strides;
  void *dk, *dv;
  // kSparse: see mr_flash_blocks; block_rows: blocks of queries of a head.
  int32_t block_q, block_k, block_rows;
  const int32_t *block_starts, *block_columns;
  // kSparse: dQ is int32, times a row's power of two and a column's factor; null: float32. [batch, heads,
  // query_tiles * kQueries], [batch, kv_heads, kDim].
  const int8_t* row_exponents;
  const float* column_factors;
};

// Tiles of kQueries that see keys [key, key + kKeys), and tiles of keys that queries of a tile see: of one
// another.
template <class C>
struct FlashQueryTiles {
  int32_t first, past;
  __device__ FlashQueryTiles(const FlashShape& s, const FlashSequence& seq, int32_t tile) {
    const int32_t key = tile * C::kKeys, last = min(key + C::kKeys, seq.k_len) - 1;
    const int32_t past_query = seq.past_query(s, last), first_query = seq.first_query(s, key);
    past = past_query > first_query ? (past_query + C::kQueries - 1) / C::kQueries : 0;
    first = min(past, first_query / C::kQueries);
  }
  // Past the last tile of keys that the queries of the tile see.
  __device__ static int32_t past_key_tile(const FlashShape& s, const FlashSequence& seq, int32_t tile) {
    const int32_t last = min((tile + 1) * C::kQueries, seq.q_len) - 1;
    return (seq.past_key(s, last) + C::kKeys - 1) / C::kKeys;
  }
};

#ifdef MILLRACE_HAS_WGMMA

template <class C>
struct FlashBackwardShared {
  uint8_t* base;
  __device__ uint64_t* barrier(int i) const { return reinterpret_cast<uint64_t*>(base + C::kBarriersAt) + i; }
  // Stages of Q with lse, and of dO with D.
  __device__ uint64_t* full(bool gradients, uint32_t n) const {
    return barrier((gradients ? 2 : 0) * C::kStages + static_cast<int>(n % C::kStages));
  }
  __device__ uint64_t* empty(bool gradients, uint32_t n) const {
    return barrier((gradients ? 3 : 1) * C::kStages + static_cast<int>(n % C::kStages));
  }
  __device__ uint64_t* keys_full() const { return barrier(4 * C::kStages); }
  // dQ of a step: written by the consumers; read by the copy engine.
  __device__ uint64_t* dq_full(uint32_t n) const {
    return barrier(4 * C::kStages + 1 + static_cast<int>(n % 2));
  }
  __device__ uint64_t* dq_empty(uint32_t n) const {
    return barrier(4 * C::kStages + 3 + static_cast<int>(n % 2));
  }
  __device__ uint8_t* dq(uint32_t n) const { return base + C::kDqAt + n % 2 * (C::kDqFloats * 4); }
  __device__ int4* item() const { return reinterpret_cast<int4*>(base + C::kItemAt); }
  __device__ uint8_t* queries(uint32_t n) const {
    return base + C::kQueriesAt + n % C::kStages * C::kQueryBytes;
  }
  __device__ uint8_t* gradients(uint32_t n) const {
    return base + C::kGradientsAt + n % C::kStages * C::kQueryBytes;
  }
  __device__ float* lse(uint32_t n) const {
    return reinterpret_cast<float*>(base + C::kLseAt + n % C::kStages * C::kRowBytes);
  }
  __device__ float* delta(uint32_t n) const {
    return reinterpret_cast<float*>(base + C::kDeltaAt + n % C::kStages * C::kRowBytes);
  }
  // kSparse: {head, tile, which halves of queries and keys are listed: 2 * half of queries + half of keys}; a
  // negative tile: no more.
  __device__ int4* step(uint32_t n) const {
    return reinterpret_cast<int4*>(base + C::kStepsAt) + n % C::kStepSlots;
  }
  __device__ int8_t* row_exponents(uint32_t n) const {
    return reinterpret_cast<int8_t*>(base + C::kRowFactorsAt + n % C::kStages * C::kQueries);
  }
  __device__ float* column_factors() const { return reinterpret_cast<float*>(base + C::kColumnFactorsAt); }
  __device__ uint8_t* ds(uint32_t n) const { return base + C::kDsAt + n % 2 * C::kDsBytes; }

  __device__ void init() const {
    constexpr uint32_t kWarps = kFlashBackwardConsumers * ptx::kWarpgroupWarps;
    for (uint32_t n = 0; n < C::kStages; ++n) {
      for (const bool gradients : {false, true}) {
        ptx::barrier_init(full(gradients, n), 1);
        ptx::barrier_init(empty(gradients, n), kWarps);
      }
    }
    ptx::barrier_init(keys_full(), 1);
    for (uint32_t n = 0; n < 2; ++n) {
      ptx::barrier_init(dq_full(n), kWarps);
      ptx::barrier_init(dq_empty(n), 1);
    }
    ptx::barrier_init_fence();
  }
};

// What a CTA works on: steps over tiles of queries, head by head of the group.
template <class C>
struct FlashBackwardItem {
  int32_t b, kv_head, tile;
  FlashSequence seq;
  FlashQueryTiles<C> tiles;
  __device__ FlashBackwardItem(const FlashBackwardParams& p, const int4& at)
      : b(at.x), kv_head(at.y), tile(at.z), seq(p.shape, at.x), tiles(p.shape, seq, at.z) {}
  __device__ int32_t per_head() const { return tiles.past - tiles.first; }
  __device__ int32_t steps(const FlashShape& s) const { return per_head() * s.group; }
};

// Which halves of the CTA's keys block `block` of queries lists: bit by bit. starts: of its head.
template <class C>
__device__ uint32_t flash_listed_halves(const FlashBackwardParams& p, const int32_t* starts, int32_t block,
                                        int32_t tile) {
  const int32_t key = p.block_k == 64 ? 2 * tile : tile;
  int32_t low = __ldg(starts + block), past = __ldg(starts + block + 1);
  const int32_t end = past;
  while (low < past) {
    const int32_t middle = (low + past) / 2;
    if (__ldg(p.block_columns + middle) < key) {
      low = middle + 1;
    } else {
      past = middle;
    }
  }
  if (low == end) return 0;
  const int32_t found = __ldg(p.block_columns + low);
  if (p.block_k != 64) return found == key ? 3 : 0;
  if (found == key + 1) return 2;
  if (found != key) return 0;
  return low + 1 < end && __ldg(p.block_columns + low + 1) == key + 1 ? 3 : 1;
}

// One warp: what a CTA works on, step by step.
template <class C>
class FlashBackwardProducer {
 public:
  __device__ FlashBackwardProducer(const FlashBackwardParams& p, const FlashBackwardShared<C>& shared,
                                   const FlashBackwardItem<C>& item)
      : p_(p), shared_(shared), item_(item), lane_(static_cast<int32_t>(threadIdx.x % kWarpLanes)) {}

  __device__ void run() {
    load_keys();
    for (int32_t g = 0; g < p_.shape.group; ++g) {
      const int32_t head = item_.kv_head * p_.shape.group + g;
      if constexpr (C::kSparse) {
        load_listed(head);
      } else {
        for (int32_t tile = item_.tiles.first; tile < item_.tiles.past; ++tile) load_step(head, tile, 0);
      }
    }
    if constexpr (C::kSparse) {  // for the consumers, and for both that add
      ptx::barrier_wait(shared_.empty(false, n_), n_ / C::kStages % 2 ^ 1);
      if (lane_ != 0) return;
      *shared_.step(n_) = *shared_.step(n_ + 1) = int4{-1, -1, 0, 0};
      ptx::barrier_arrive(shared_.full(false, n_));
    }
  }

 private:
  __device__ void load_keys() {
    const FlashShape& s = p_.shape;
    const FlashRows keys =
        flash_rows(s.cu_k != nullptr, s.max_k, item_.seq.k_start, item_.seq.k_len, item_.kv_head, item_.b);
    const bool factors = C::kSparse && p_.row_exponents != nullptr;
    if (lane_ == 0) {
      ptx::barrier_arrive_expect(shared_.keys_full(), 2 * C::kKeyBytes + (factors ? C::kDim * 4 : 0));
    }
    __syncwarp();
    if (factors && lane_ == 0) {
      const int64_t at = (int64_t{item_.b} * s.kv_heads + item_.kv_head) * C::kDim;
      ptx::bulk_copy_kept(shared_.column_factors(), p_.column_factors + at, C::kDim * 4, shared_.keys_full());
    }
    if (lane_ >= 2 * C::kParts) return;
    const int32_t part = lane_ % C::kParts;
    const bool values = lane_ >= C::kParts;
    ptx::tma_load_5d(shared_.base + (values ? C::kValuesAt : 0) + part * C::kKeyPartBytes,
                     values ? &p_.v : &p_.k, part * kFlashPart, keys.row + item_.tile * C::kKeys, keys.c2,
                     keys.c3, 0, shared_.keys_full());
  }

  // kSparse: the head's steps. 32 blocks of queries at once: a lane's is listed or not.
  __device__ void load_listed(int32_t head) {
    const int32_t first = item_.tiles.first * C::kQueries / p_.block_q,
                  past = (item_.tiles.past * C::kQueries + p_.block_q - 1) / p_.block_q;
    const int32_t* starts = p_.block_starts + (int64_t{item_.b} * p_.shape.heads + head) * p_.block_rows;
    for (int32_t from = first; from < past; from += kWarpLanes) {
      const int32_t block = from + lane_;
      uint32_t halves = 0;
      if (block < min(past, p_.block_rows)) {
        halves = flash_listed_halves<C>(p_, starts, block, item_.tile);
      }
      uint32_t listed = __ballot_sync(kAllLanes, halves != 0);
      while (listed != 0) {
        const int32_t at = __ffs(static_cast<int>(listed)) - 1;
        if (p_.block_q < C::kQueries) {  // two blocks are a tile, and `from` is even
          const int32_t even = at & ~1;
          const uint32_t mask =
              __shfl_sync(kAllLanes, halves, even) | __shfl_sync(kAllLanes, halves, even + 1) << 2;
          listed &= ~(3u << even);
          load_step(head, (from + even) / 2, static_cast<int32_t>(mask));
          continue;
        }
        listed &= listed - 1;
        const auto mask = static_cast<int32_t>(__shfl_sync(kAllLanes, halves, at) * 5);
        const int32_t tiles = p_.block_q / C::kQueries;
        for (int32_t i = 0; i < tiles; ++i) {
          const int32_t tile = (from + at) * tiles + i;
          if (tile >= item_.tiles.first && tile < item_.tiles.past) load_step(head, tile, mask);
        }
      }
    }
  }

  __device__ void load_step(int32_t head, int32_t tile, int32_t mask) {
    const FlashShape& s = p_.shape;
    const FlashRows rows =
        flash_rows(s.cu_q != nullptr, s.max_q, item_.seq.q_start, item_.seq.q_len, head, item_.b);
    const int64_t row_at = ((int64_t{item_.b} * s.heads + head) * p_.query_tiles + tile) * C::kQueries;
    const uint32_t n = n_++;
    for (const bool gradients : {false, true}) {
      uint64_t* full = shared_.full(gradients, n);
      ptx::barrier_wait(shared_.empty(gradients, n), n / C::kStages % 2 ^ 1);
      if (lane_ == 0) {
        const bool factors = C::kSparse && !gradients && p_.row_exponents != nullptr;
        if (C::kSparse && !gradients) *shared_.step(n) = int4{head, tile, mask, 0};
        ptx::barrier_arrive_expect(full, C::kQueryBytes + C::kRowBytes + (factors ? C::kQueries : 0));
        ptx::bulk_copy_kept(gradients ? shared_.delta(n) : shared_.lse(n),
                            (gradients ? p_.delta : p_.lse) + row_at, C::kRowBytes, full);
        if (factors) {
          ptx::bulk_copy_kept(shared_.row_exponents(n), p_.row_exponents + row_at, C::kQueries, full);
        }
      }
      __syncwarp();
      if (lane_ < C::kParts) {
        ptx::tma_load_5d((gradients ? shared_.gradients(n) : shared_.queries(n)) + lane_ * C::kQueryPartBytes,
                         gradients ? &p_.d_out : &p_.q, lane_ * kFlashPart, rows.row + tile * C::kQueries,
                         rows.c2, rows.c3, 0, full);
      }
    }
  }

  const FlashBackwardParams& p_;
  const FlashBackwardShared<C>& shared_;
  const FlashBackwardItem<C>& item_;
  const int32_t lane_;
  uint32_t n_ = 0;
};

// One thread: adds the dQ of every second step, from `parity` on, to the workspace.
template <class C>
__device__ void flash_backward_add(const FlashBackwardParams& p, const FlashBackwardShared<C>& shared,
                                   const FlashBackwardItem<C>& item, uint32_t parity) {
  const FlashShape& s = p.shape;
  uint32_t n = 0;
  for (int32_t g = 0; g < s.group; ++g) {
    const int64_t tile_at = (int64_t{item.b} * s.heads + item.kv_head * s.group + g) * p.query_tiles;
    for (int32_t tile = item.tiles.first; tile < item.tiles.past; ++tile, ++n) {
      if (n % 2 != parity) continue;
      ptx::barrier_wait(shared.dq_full(n), n / 2 % 2);
      // From the last tile of keys that these queries see to the first.
      int32_t turn = 0;
      if (p.turns != nullptr) {
        turn = FlashQueryTiles<C>::past_key_tile(s, item.seq, tile) - 1 - item.tile;
        while (ptx::load_acquire(p.turns + tile_at + tile) != turn) {
        }
        ptx::fence_bulk_copies();
      }
      ptx::bulk_add(p.dq + (tile_at + tile) * C::kDqFloats, shared.dq(n), C::kDqFloats * 4);
      ptx::bulk_store_commit();
      ptx::bulk_store_wait();
      ptx::barrier_arrive(shared.dq_empty(n));
      if (p.turns != nullptr) {
        ptx::bulk_written();
        ptx::fence_bulk_copies();
        ptx::store_release(p.turns + tile_at + tile, turn + 1);
      }
    }
  }
  ptx::bulk_written();
}

// The same of lists of blocks, in any order.
template <class C>
__device__ void flash_backward_add_listed(const FlashBackwardParams& p, const FlashBackwardShared<C>& shared,
                                          const FlashBackwardItem<C>& item, uint32_t parity) {
  for (uint32_t n = parity;; n += 2) {
    ptx::barrier_wait(shared.dq_full(n), n / 2 % 2);
    const int4 step = *shared.step(n);
    if (step.y < 0) break;
    const int64_t tile_at = (int64_t{item.b} * p.shape.heads + step.x) * p.query_tiles + step.y;
    float* to = p.dq + tile_at * C::kDqFloats;
    if (p.row_exponents != nullptr) {
      ptx::bulk_add(reinterpret_cast<int32_t*>(to), shared.dq(n), C::kDqFloats * 4);
    } else {
      ptx::bulk_add(to, shared.dq(n), C::kDqFloats * 4);
    }
    ptx::bulk_store_commit();
    ptx::bulk_store_wait();
    ptx::barrier_arrive(shared.dq_empty(n));
  }
  ptx::bulk_written();
}

// A warpgroup's 64 keys. Lane (g, t) of warp w has keys 16w + g and 16w + g + 8, queries 8j + 2t and + 1.
template <class C>
class FlashBackwardConsumer {
  using Element = typename C::Element;
  static constexpr int kScores = C::kQueries / 2, kSums = C::kDim / 2, kSteps = C::kQueries / 16;
  static constexpr int kDqSums = C::kDqColumns / 2;

 public:
  __device__ FlashBackwardConsumer(const FlashBackwardParams& p, const FlashBackwardShared<C>& shared,
                                   const FlashBackwardItem<C>& item)
      : p_(p),
        shared_(shared),
        item_(item),
        warpgroup_(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / ptx::kWarpgroupThreads), 0)),
        thread_(static_cast<int>(threadIdx.x % ptx::kWarpgroupThreads)) {}

  __device__ __forceinline__ void run() {
    begin_rows();
    float dk[kSums], dv[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) dk[i] = dv[i] = 0.0f;
    const int32_t steps = C::kSparse ? 1 << 30 : item_.steps(p_.shape);
    ptx::barrier_wait(shared_.keys_full(), 0);
    if (steps > 0) mainloop(steps, dk, dv);
    store(p_.dv, p_.dv_strides, p_.value_dim, 1.0f, dv);
    store(p_.dk, p_.dk_strides, p_.head_dim, p_.shape.scale, dk);
  }

 private:
  __device__ static void arrive(uint64_t* barrier) {
    if (threadIdx.x % kWarpLanes == 0) ptx::barrier_arrive(barrier);
  }

  __device__ __forceinline__ void begin_rows() {
    const FlashShape& s = p_.shape;
    const FlashSequence& seq = item_.seq;
    const int32_t first = item_.tile * C::kKeys + warpgroup_ * 64;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      key_[r] = first + thread_ / kWarpLanes * 16 + thread_ % kWarpLanes / 4 + 8 * r;
      first_query_[r] = seq.first_query(s, key_[r]);
      past_query_[r] = key_[r] < seq.k_len ? seq.past_query(s, key_[r]) : 0;
    }
    // Queries that see all 64 keys; past the last query everything is zeros.
    whole_first_ = seq.first_query(s, first + 63);
    whole_past_ = first + 64 <= seq.k_len ? first - seq.offset() + s.window_left + 1 : 0;
  }

  __device__ __forceinline__ void mainloop(int32_t steps, float (&dk)[kSums], float (&dv)[kSums]) {
    float score[kScores];
    uint32_t prob[kSteps][4], ds[kSteps][4];
    int32_t tile = item_.tiles.first;
    for (uint32_t n = 0; n < static_cast<uint32_t>(steps); ++n) {
      int2 shown{0, C::kQueries};
      {
        float dp[kScores];
        ptx::barrier_wait(shared_.full(false, n), n / C::kStages % 2);
        if constexpr (C::kSparse) {
          const int4 step = *shared_.step(n);
          __syncwarp();  // all lanes have read it
          if (step.y < 0) {
            // All warps' dQ of the step before is there: a second arrival at its barrier is not taken for it.
            ptx::named_barrier<1, kFlashBackwardConsumers * ptx::kWarpgroupThreads>();
            arrive(shared_.dq_full(n));
            arrive(shared_.dq_full(n + 1));
            break;
          }
          tile = step.y, shown = shown_of(step.z);
        }
        multiply_scores(shared_.base, shared_.queries(n), score);
        ptx::barrier_wait(shared_.full(true, n), n / C::kStages % 2);
        multiply_scores(shared_.base + C::kValuesAt, shared_.gradients(n), dp);
        ptx::wgmma_wait<1>();
        ptx::fence_registers(score);
        exponentiate(tile, shown, shared_.lse(n), score, prob);
        ptx::fence_registers(dv);
        multiply_add(prob, shared_.gradients(n), dv);
        ptx::wgmma_wait<1>();
        ptx::fence_registers(dp);
        differentiate(shared_.delta(n), score, prob, dp, ds);
      }
      store_ds(n, ds);
      ptx::publish_to_async();
      ptx::named_barrier<1, kFlashBackwardConsumers * ptx::kWarpgroupThreads>();  // all of dS is there
      float dq[kDqSums];
      multiply_dq(n, dq);
      ptx::fence_registers(dk);
      multiply_add(ds, shared_.queries(n), dk);
      ptx::wgmma_wait<1>();
      ptx::fence_registers(dq);
      ptx::fence_registers(dv);
      ptx::fence_registers(prob);
      arrive(shared_.empty(true, n));
      store_dq(n, dq);
      ptx::wgmma_wait<0>();
      ptx::fence_registers(dk);
      ptx::fence_registers(ds);
      arrive(shared_.empty(false, n));
      if (!C::kSparse && ++tile == item_.tiles.past) tile = item_.tiles.first;
    }
  }

  // This warpgroup's 64 rows of `a` (keys or values) times the tile at `b` (queries or dO), of all
  // dimensions.
  __device__ __forceinline__ void multiply_scores(const uint8_t* a, const uint8_t* b,
                                                  float (&d)[kScores]) const {
    const uint64_t rows = ptx::wgmma_operand(a + warpgroup_ * 64 * ptx::kSwizzleRowBytes);
    const uint64_t columns = ptx::wgmma_operand(b);
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < C::kDim / 16; ++s) {
      ptx::wgmma_16bit<Element, 0, 0>(d, rows + s / 4 * (C::kKeyPartBytes / 16) + s % 4 * 2,
                                      columns + s / 4 * (C::kQueryPartBytes / 16) + s % 4 * 2, s > 0);
    }
    ptx::wgmma_commit();
  }
  // d += a b over the tile's queries.
  __device__ __forceinline__ void multiply_add(const uint32_t (&a)[kSteps][4], const uint8_t* b,
                                               float (&d)[kSums]) const {
    const uint64_t rows = ptx::wgmma_transposed_operand(b, C::kQueryPartBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      ptx::wgmma_16bit<Element, 1>(d, a[s], rows + s * (16 * ptx::kSwizzleRowBytes / 16), true);
    }
    ptx::wgmma_commit();
  }
  // dQ = dS K over all keys: this warpgroup's queries or columns.
  __device__ __forceinline__ void multiply_dq(uint32_t n, float (&dq)[kDqSums]) const {
    constexpr bool kByColumns = C::kQueries == 64;
    const uint8_t* ds = shared_.ds(n) + (kByColumns ? 0 : warpgroup_ * C::kKeyPartBytes);
    const uint8_t* keys =
        shared_.base + (kByColumns ? warpgroup_ * (C::kDqColumns / kFlashPart) * C::kKeyPartBytes : 0);
    const uint64_t a = ptx::wgmma_transposed_operand(ds, C::kKeyPartBytes);
    const uint64_t b = ptx::wgmma_transposed_operand(keys, C::kKeyPartBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < C::kKeys / 16; ++s) {
      constexpr int kStep = 16 * ptx::kSwizzleRowBytes / 16;
      ptx::wgmma_16bit<Element, 1, 1>(dq, a + s * kStep, b + s * kStep, s > 0);
    }
    ptx::wgmma_commit();
  }

  // kSparse: queries of the tile that list this warpgroup's keys, from the first to past the last.
  __device__ int2 shown_of(int32_t mask) const {
    const bool first = (mask >> warpgroup_ & 1) != 0, second = (mask >> warpgroup_ & 4) != 0;
    if (C::kQueries == 64) return {0, first ? 64 : 0};
    return {first ? 0 : 64, second ? 128 : first ? 64 : 0};
  }
  // Scores become probabilities, also rounded in prob; of a soft cap, times its derivative 1 - tanh^2. shown:
  // of the tile's queries, by a list.
  __device__ __forceinline__ void exponentiate(int32_t tile, const int2& shown, const float* lse,
                                               float (&score)[kScores], uint32_t (&prob)[kSteps][4]) const {
    const FlashShape& s = p_.shape;
    const float* at = lse + thread_ % 4 * 2;
    const float in = C::kCapped ? s.scale / s.softcap : 0.0f, out = s.softcap * kFlashLog2e;
    if constexpr (C::kCapped) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) score[i] = out * flash_tanh(score[i] * in);
    }
    const float factor = C::kCapped ? 1.0f : s.scale_log2;
    const int32_t query = tile * C::kQueries;
    const bool listed = !C::kSparse || (shown.x == 0 && shown.y == C::kQueries);
    if (query < whole_first_ || query + C::kQueries > whole_past_ || !listed) {
      mask(query, shown, factor, score);
    }
    if constexpr (C::kCapped) {
      const float inverse = 1.0f / out;
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        const float2 base = *reinterpret_cast<const float2*>(at + i / 4 * 8);
        const float p[2] = {ptx::exp2_approx(score[i] - base.x), ptx::exp2_approx(score[i + 1] - base.y)};
        prob[i / 8][i / 2 % 4] = flash_pack<Element>(p[0], p[1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float tanh = score[i + e] * inverse;
          score[i + e] = p[e] > 0.0f ? p[e] * fmaf(-tanh, tanh, 1.0f) : p[e];
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
        const float2 base = *reinterpret_cast<const float2*>(at + 8 * j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = score[4 * j + e];
          x = ptx::exp2_approx(fmaf(x, factor, e % 2 == 0 ? -base.x : -base.y));
        }
      }
      round_to(score, prob);
    }
  }
  __device__ __forceinline__ void mask(int32_t query, const int2& shown, float factor,
                                       float (&score)[kScores]) const {
    const float hidden = factor < 0.0f ? INFINITY : -INFINITY;
    const int32_t from = query + thread_ % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int32_t low = first_query_[r] - from, past = past_query_[r] - from;
      if constexpr (C::kSparse) {
        const int32_t in_eight = thread_ % 4 * 2;
        low = max(low, shown.x - in_eight), past = min(past, shown.y - in_eight);
      }
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        const int column = i / 2 * 8 + i % 2;
        float& x = score[i / 2 * 4 + 2 * r + i % 2];
        x = column >= low && column < past ? x : hidden;
      }
    }
  }
  // ds = P (dp - D), rounded.
  __device__ __forceinline__ void differentiate(const float* delta, const float (&score)[kScores],
                                                const uint32_t (&prob)[kSteps][4], const float (&dp)[kScores],
                                                uint32_t (&ds)[kSteps][4]) const {
    const float* at = delta + thread_ % 4 * 2;
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const float2 base = *reinterpret_cast<const float2*>(at + i / 4 * 8);
      float2 p{score[i], score[i + 1]};
      if constexpr (C::kRoundedProbs) p = flash_unpack<Element>(prob[i / 8][i / 2 % 4]);
      ds[i / 8][i / 2 % 4] = flash_pack<Element>(p.x * (dp[i] - base.x), p.y * (dp[i + 1] - base.y));
    }
  }
  __device__ __forceinline__ static void round_to(const float (&x)[kScores], uint32_t (&to)[kSteps][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) to[i / 4][i % 4] = flash_pack<Element>(x[2 * i], x[2 * i + 1]);
  }

  // dS^T as rows of keys with 64 queries each, in the swizzle. Two buffers: by the barrier of the next step
  // both warpgroups are done with this one.
  __device__ __forceinline__ void store_ds(uint32_t n, const uint32_t (&ds)[kSteps][4]) const {
    const uint32_t lane = threadIdx.x % kWarpLanes, matrix = lane / 8;
    const auto row =
        static_cast<uint32_t>(warpgroup_ * 64 + thread_ / kWarpLanes * 16) + matrix % 2 * 8 + lane % 8;
    const uint32_t base = ptx::shared_address(shared_.ds(n));
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      ptx::store_matrices(base + s / 4 * C::kKeyPartBytes + ptx::swizzled(row, s % 4 * 32 + matrix / 2 * 16),
                          ds[s]);
    }
  }
  // Sums 4i .. 4i + 3 of dQ times their rows' and columns' factors, as int32.
  __device__ __forceinline__ float4 fixed_point(uint32_t n, int i, const float4& x) const {
    constexpr bool kByColumns = C::kQueries == 64;
    const int row = (kByColumns ? 0 : warpgroup_ * 64) + thread_ / kWarpLanes * 16 + thread_ % kWarpLanes / 4,
              column = (kByColumns ? warpgroup_ * C::kDqColumns : 0) + 8 * i + thread_ % 4 * 2;
    const int8_t* rows = shared_.row_exponents(n) + row;
    const float2 by = *reinterpret_cast<const float2*>(shared_.column_factors() + column);
    const float first = __int_as_float((rows[0] + 127) << 23), second = __int_as_float((rows[8] + 127) << 23);
    return {__int_as_float(__float2int_rn(x.x * (first * by.x))),
            __int_as_float(__float2int_rn(x.y * (first * by.y))),
            __int_as_float(__float2int_rn(x.z * (second * by.x))),
            __int_as_float(__float2int_rn(x.w * (second * by.y)))};
  }
  // [warpgroup][.. of four sums][thread] float4.
  __device__ __forceinline__ void store_dq(uint32_t n, const float (&dq)[kDqSums]) const {
    auto* to = reinterpret_cast<float4*>(shared_.dq(n)) + warpgroup_ * (C::kDqFloats / 8) + thread_;
    ptx::barrier_wait(shared_.dq_empty(n), n / 2 % 2 ^ 1);
#pragma unroll
    for (int i = 0; i < kDqSums / 4; ++i) {
      float4 x{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
      if constexpr (C::kSparse) {
        if (p_.row_exponents != nullptr) x = fixed_point(n, i, x);
      }
      to[i * ptx::kWarpgroupThreads] = x;
    }
    ptx::publish_to_async();
    __syncwarp();  // all lanes' sums are there
    arrive(shared_.dq_full(n));
  }

  // Rows of dK or dV: a lane has eight columns of every 32.
  __device__ __forceinline__ void store(void* out, const FlashStrides& strides, int32_t dim, float scale,
                                        const float (&sums)[kSums]) const {
    const int t = thread_ % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Element* row = static_cast<Element*>(out) +
                     flash_row_at(strides, item_.b, item_.seq.k_start, key_[r], item_.kv_head);
#pragma unroll
      for (int i = 0; i < C::kDim / 32; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* x = sums + 16 * i + 4 * j + 2 * r;
          words[j] = flash_pack<Element>(x[0] * scale, x[1] * scale);
        }
        flash_quad_transpose(words);
        if (key_[r] < item_.seq.k_len && 32 * i + 8 * t < dim) {
          *reinterpret_cast<uint4*>(row + 32 * i + 8 * t) = uint4{words[0], words[1], words[2], words[3]};
        }
      }
    }
  }

  const FlashBackwardParams& p_;
  const FlashBackwardShared<C>& shared_;
  const FlashBackwardItem<C>& item_;
  const int warpgroup_, thread_;
  int32_t key_[2], first_query_[2], past_query_[2];
  int32_t whole_first_, whole_past_;
};

#endif  // MILLRACE_HAS_WGMMA

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    flash_backward_kernel(const __grid_constant__ FlashBackwardParams p) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t memory[];
  const FlashBackwardShared<C> shared{memory};
  if (threadIdx.x == 0) {
    shared.init();
    const int32_t ticket = atomicAdd(p.schedule.counter, 1);
    FlashSchedule::Item at{-1, 0, 0, 0};
    if (ticket < p.schedule.items(p.shape)) {
      at = p.schedule.at(p.shape, ticket);
      if (p.ascending) {
        const FlashSequence seq(p.shape, at.b);
        at.tile = (seq.k_len + C::kKeys - 1) / C::kKeys - 1 - at.tile;
      }
    }
    *shared.item() = {at.b, at.head, at.tile, 0};
  }
  __syncthreads();  // the barriers and the item are there
  const int4 at = *shared.item();
  if (at.x < 0) return;
  const FlashBackwardItem<C> item(p, at);
  if (threadIdx.x < kFlashBackwardConsumers * ptx::kWarpgroupThreads) {
    ptx::more_registers<C::kConsumerRegisters>();
    FlashBackwardConsumer<C>(p, shared, item).run();
  } else {
    ptx::fewer_registers<C::kProducerRegisters>();
    const int warp =
        static_cast<int>(threadIdx.x / kWarpLanes) - kFlashBackwardConsumers * ptx::kWarpgroupWarps;
    if (warp == 0) FlashBackwardProducer<C>(p, shared, item).run();
    if ((warp == 1 || warp == 2) && threadIdx.x % kWarpLanes == 0) {
      const auto parity = static_cast<uint32_t>(warp - 1);
      if constexpr (C::kSparse) {
        flash_backward_add_listed<C>(p, shared, item, parity);
      } else {
        flash_backward_add<C>(p, shared, item, parity);
      }
    }
  }
#else
  __trap();
#endif
}

}  // namespace millrace::cuda
