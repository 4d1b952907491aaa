// The forward kernel on Hopper's warpgroup products. See docs/kernels/cuda_flash_attention.md.
//
// A persistent CTA has one producer warp and two or three consumer warpgroups of 64 rows of queries. The
// producer loads Q of an item once and tiles of K and V through rings of stages, by tensor copies. A consumer
// issues Q K^T of the next tile and P V of this one, and computes the softmax of the next under P V. With two
// warpgroups each has its turn to issue, so that one's softmax runs under the other's products.
#pragma once

#include <algorithm>

#include "kernels/cuda/attention/flash_schedule.cuh"

namespace millrace::cuda {

// Tiles of kConsumers * 64 queries and kTileKeys keys; kStages of each of K and V.
template <class ElementType, int kHeadDim, int kValueDim, int kKeys, int kWarpgroups, int kDepth, bool kTurns>
struct FlashForwardConfig {
  using Element = ElementType;
  static constexpr int kDim = kHeadDim, kDimV = kValueDim, kTileKeys = kKeys, kConsumers = kWarpgroups,
                       kStages = kDepth;
  static constexpr bool kTakeTurns = kTurns;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kParts = (kDim + kFlashPart - 1) / kFlashPart,
                       kPartsV = (kDimV + kFlashPart - 1) / kFlashPart;
  static constexpr int kThreads = (kConsumers + 1) * ptx::kWarpgroupThreads;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 256 - 16 : kConsumers == 2 ? 232 : 160;
  static constexpr int kQueryPartBytes = kRows * ptx::kSwizzleRowBytes;
  static constexpr int kKeyPartBytes = kTileKeys * ptx::kSwizzleRowBytes;
  static constexpr int kKeyBytes = kParts * kKeyPartBytes, kValueBytes = kPartsV * kKeyPartBytes;
  static constexpr int kKeysAt = kParts * kQueryPartBytes, kValuesAt = kKeysAt + kStages * kKeyBytes;
  static constexpr int kBarriersAt = kValuesAt + kStages * kValueBytes;
  static constexpr int kItemSlots = 2;
  static constexpr int kBarriers = 4 * kStages + 2 + 2 * kItemSlots;
  static constexpr int kItemsAt = kBarriersAt + kBarriers * 8;
  static constexpr int kSharedBytes = kItemsAt + kItemSlots * 16;
  static_assert(kKeyPartBytes % 1024 == 0);
};

struct FlashForwardParams {
  CUtensorMap q, k, v;
  FlashShape shape;
  FlashSchedule schedule;
  FlashStrides out_strides;
  void* out;
  float* lse;        // or null
  int32_t box_rows;  // of K and V
};

#ifdef MILLRACE_HAS_WGMMA

// Barriers and buffers, as producer and consumers see them.
template <class C>
struct FlashForwardShared {
  uint8_t* base;
  __device__ uint64_t* barrier(int i) const { return reinterpret_cast<uint64_t*>(base + C::kBarriersAt) + i; }
  // full: the copies of a tile have arrived. empty: every consumer warp has read it.
  __device__ uint64_t* full(bool values, uint32_t n) const {
    return barrier((values ? 2 : 0) * C::kStages + static_cast<int>(n % C::kStages));
  }
  __device__ uint64_t* empty(bool values, uint32_t n) const {
    return barrier((values ? 3 : 1) * C::kStages + static_cast<int>(n % C::kStages));
  }
  __device__ uint64_t* query_full() const { return barrier(4 * C::kStages); }
  __device__ uint64_t* query_empty() const { return barrier(4 * C::kStages + 1); }
  // The item ring: the producer writes what comes next, consumers read it.
  __device__ uint64_t* item_full(uint32_t n) const {
    return barrier(4 * C::kStages + 2 + static_cast<int>(n % C::kItemSlots));
  }
  __device__ uint64_t* item_empty(uint32_t n) const {
    return barrier(4 * C::kStages + 2 + C::kItemSlots + static_cast<int>(n % C::kItemSlots));
  }
  __device__ int4* item(uint32_t n) const {
    return reinterpret_cast<int4*>(base + C::kItemsAt) + n % C::kItemSlots;
  }
  __device__ uint8_t* keys(uint32_t n) const { return base + C::kKeysAt + n % C::kStages * C::kKeyBytes; }
  __device__ uint8_t* values(uint32_t n) const {
    return base + C::kValuesAt + n % C::kStages * C::kValueBytes;
  }

  __device__ void init() const {
    constexpr uint32_t kWarps = C::kConsumers * ptx::kWarpgroupWarps;
    for (uint32_t n = 0; n < C::kStages; ++n) {
      for (const bool values : {false, true}) {
        ptx::barrier_init(full(values, n), 1);
        ptx::barrier_init(empty(values, n), kWarps);
      }
    }
    ptx::barrier_init(query_full(), 1);
    ptx::barrier_init(query_empty(), kWarps);
    for (uint32_t n = 0; n < C::kItemSlots; ++n) {
      ptx::barrier_init(item_full(n), 1);
      ptx::barrier_init(item_empty(n), kWarps);
    }
    ptx::barrier_init_fence();
  }
};

// Tiles of keys that the queries [tile * kRows, + kRows) see.
template <class C>
struct FlashKeyTiles {
  int32_t first, past;
  __device__ FlashKeyTiles(const FlashShape& s, const FlashSequence& seq, int32_t tile) {
    const int32_t query = tile * C::kRows, last = min(query + C::kRows, seq.q_len) - 1;
    const int32_t past_key = seq.past_key(s, last), first_key = seq.first_key(s, query);
    past = past_key > first_key ? (past_key + C::kTileKeys - 1) / C::kTileKeys : 0;
    first = min(past, first_key / C::kTileKeys);
  }
};

// One warp: all lanes wait, lane i copies box i.
template <class C>
class FlashForwardProducer {
 public:
  __device__ FlashForwardProducer(const FlashForwardParams& p, uint8_t* shared)
      : p_(p), shared_{shared}, lane_(static_cast<int32_t>(threadIdx.x % kWarpLanes)) {}

  __device__ void run() {
    const int32_t items = p_.schedule.items(p_.shape);
    int32_t item = static_cast<int32_t>(blockIdx.x);
    for (uint32_t round = 0;; ++round) {
      // On its way while this item's tiles are loaded.
      int32_t next = 0;
      if (lane_ == 0) next = atomicAdd(p_.schedule.counter, 1) + static_cast<int32_t>(gridDim.x);
      const bool has = item < items;
      const FlashSchedule::Item at = has ? p_.schedule.at(p_.shape, item) : FlashSchedule::Item{-1, 0, 0};
      ptx::barrier_wait(shared_.item_empty(round), round / C::kItemSlots % 2 ^ 1);
      if (lane_ == 0) {
        *shared_.item(round) = {at.b, at.head, at.tile, 0};
        ptx::barrier_arrive(shared_.item_full(round));
      }
      if (!has) return;
      load_item(at, round);
      item = __shfl_sync(kAllLanes, next, 0);
    }
  }

 private:
  __device__ void load_item(const FlashSchedule::Item& at, uint32_t round) {
    const FlashShape& s = p_.shape;
    const FlashSequence seq(s, at.b);
    const FlashKeyTiles<C> tiles(s, seq, at.tile);
    ptx::barrier_wait(shared_.query_empty(), round % 2 ^ 1);
    if (lane_ == 0) ptx::barrier_arrive_expect(shared_.query_full(), C::kParts * C::kQueryPartBytes);
    __syncwarp();
    if (lane_ < C::kParts) {
      const FlashRows rows = flash_rows(s.cu_q != nullptr, s.max_q, seq.q_start, seq.q_len, at.head, at.b);
      ptx::tma_load_5d(shared_.base + lane_ * C::kQueryPartBytes, &p_.q, lane_ * kFlashPart,
                       rows.row + at.tile * C::kRows, rows.c2, rows.c3, 0, shared_.query_full());
    }
    const int32_t kv_head = at.head / s.group;
    for (int32_t tile = tiles.past - 1; tile >= tiles.first; --tile) {
      load_tile<false>(seq, at.b, kv_head, tile, n_keys_);
      ++n_keys_;
      if (tile + 1 < tiles.past) load_tile<true>(seq, at.b, kv_head, tile + 1, n_values_++);
    }
    if (tiles.past > tiles.first) load_tile<true>(seq, at.b, kv_head, tiles.first, n_values_++);
  }

  template <bool kValues>
  __device__ void load_tile(const FlashSequence& seq, int32_t b, int32_t kv_head, int32_t tile, uint32_t n) {
    constexpr int kParts = kValues ? C::kPartsV : C::kParts;
    const FlashShape& s = p_.shape;
    const CUtensorMap* map = kValues ? &p_.v : &p_.k;
    uint64_t* full = shared_.full(kValues, n);
    uint8_t* stage = kValues ? shared_.values(n) : shared_.keys(n);
    ptx::barrier_wait(shared_.empty(kValues, n), n / C::kStages % 2 ^ 1);
    if (lane_ == 0) ptx::barrier_arrive_expect(full, kParts * C::kKeyPartBytes);
    __syncwarp();
    if (s.pages == nullptr) {
      if (lane_ >= kParts) return;
      const FlashRows rows = flash_rows(s.cu_k != nullptr, s.max_k, seq.k_start, seq.k_len, kv_head, b);
      ptx::tma_load_5d(stage + lane_ * C::kKeyPartBytes, map, lane_ * kFlashPart,
                       rows.row + tile * C::kTileKeys, rows.c2, rows.c3, 0, full);
      return;
    }
    const int32_t boxes = C::kTileKeys / p_.box_rows;
    for (int32_t i = lane_; i < boxes * kParts; i += kWarpLanes) {
      const int32_t part = i / boxes, row = i % boxes * p_.box_rows, key = tile * C::kTileKeys + row;
      const int32_t rows = max(0, min(p_.box_rows, seq.k_len - key));
      const int32_t page = rows > 0 ? s.pages[b * s.pages_stride + key / s.page_tokens] : 0;
      ptx::tma_load_5d(stage + part * C::kKeyPartBytes + row * ptx::kSwizzleRowBytes, map, part * kFlashPart,
                       p_.box_rows - rows, key % s.page_tokens + rows, page, kv_head, full);
    }
  }

  const FlashForwardParams& p_;
  const FlashForwardShared<C> shared_;
  const int32_t lane_;
  uint32_t n_keys_ = 0, n_values_ = 0;
};

// A warpgroup's 64 rows. Lane (g, t) of warp w has rows 16w + g and 16w + g + 8, of a tile's scores columns
// 8j + 2t and + 1.
template <class C>
class FlashForwardConsumer {
  using Element = typename C::Element;
  static constexpr int kScores = C::kTileKeys / 2, kSums = C::kDimV / 2, kSteps = C::kTileKeys / 16;

 public:
  __device__ FlashForwardConsumer(const FlashForwardParams& p, uint8_t* shared)
      : p_(p),
        shared_{shared},
        warpgroup_(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / ptx::kWarpgroupThreads), 0)),
        queries_(shared + warpgroup_ * 64 * ptx::kSwizzleRowBytes) {}

  __device__ __forceinline__ void run() {
    if (C::kTakeTurns && warpgroup_ == 1) pass_turn();  // the first turn is warpgroup 0's
    for (uint32_t round = 0;; ++round) {
      ptx::barrier_wait(shared_.item_full(round), round / C::kItemSlots % 2);
      const int4 item = *shared_.item(round);
      __syncwarp();  // all lanes have read it
      arrive(shared_.item_empty(round));
      if (item.x < 0) return;
      run_item(item.x, item.y, item.z, round);
    }
  }

 private:
  __device__ static void arrive(uint64_t* barrier) {
    if (threadIdx.x % kWarpLanes == 0) ptx::barrier_arrive(barrier);
  }
  // Barriers 1 and 2: a warpgroup waits for its own, and the other one lets it go on.
  __device__ void wait_turn() const {
    if constexpr (C::kTakeTurns) ptx::named_barrier<2 * ptx::kWarpgroupThreads>(1 + warpgroup_);
  }
  __device__ void pass_turn() const {
    if constexpr (C::kTakeTurns) ptx::named_arrive<2 * ptx::kWarpgroupThreads>(2 - warpgroup_);
  }

  __device__ __forceinline__ void run_item(int32_t b, int32_t head, int32_t tile, uint32_t round) {
    const FlashSequence seq(p_.shape, b);
    const FlashKeyTiles<C> tiles(p_.shape, seq, tile);
    begin_rows(seq, tile);
    float acc[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) acc[i] = 0.0f;
    ptx::barrier_wait(shared_.query_full(), round % 2);
    if (tiles.past > tiles.first) {
      mainloop(tiles, acc);
    } else {
      arrive(shared_.query_empty());
    }
    epilogue(seq, b, head, acc);
  }

  __device__ __forceinline__ void begin_rows(const FlashSequence& seq, int32_t tile) {
    const int32_t first = tile * C::kRows + warpgroup_ * 64;
    const int32_t thread = static_cast<int32_t>(threadIdx.x % ptx::kWarpgroupThreads);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      query_[r] = first + thread / kWarpLanes * 16 + thread % kWarpLanes / 4 + 8 * r;
      first_key_[r] = seq.first_key(p_.shape, query_[r]);
      past_key_[r] = seq.past_key(p_.shape, query_[r]);
      row_max_[r] = -INFINITY, row_sum_[r] = 0.0f;
    }
    // Keys that all 64 rows see.
    whole_first_ = seq.first_key(p_.shape, first + 63);
    whole_past_ = seq.past_key(p_.shape, first);
  }

  __device__ __forceinline__ void mainloop(const FlashKeyTiles<C>& tiles, float (&acc)[kSums]) {
    float score[kScores], alpha[2];
    uint32_t prob[kSteps][4];
    ptx::barrier_wait(shared_.full(false, n_), n_ / C::kStages % 2);
    multiply_qk(n_, score);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(score);
    arrive(shared_.empty(false, n_));
    softmax(tiles.past - 1, score, alpha);
    round_probs(score, prob);
    for (int32_t tile = tiles.past - 2; tile >= tiles.first; --tile) {
      ptx::barrier_wait(shared_.full(false, n_ + 1), (n_ + 1) / C::kStages % 2);
      wait_turn();
      ptx::fence_registers(acc);
      multiply_qk(n_ + 1, score);
      ptx::barrier_wait(shared_.full(true, n_), n_ / C::kStages % 2);
      multiply_pv(prob, acc);
      pass_turn();
      ptx::wgmma_wait<1>();
      ptx::fence_registers(score);
      arrive(shared_.empty(false, n_ + 1));
      softmax(tile, score, alpha);
      // Here, since the assembler would have the softmax wait for P V.
      ptx::fence_registers(score);
      ptx::wgmma_wait<0>();
      ptx::fence_registers(acc);
      ptx::fence_registers(prob);
      arrive(shared_.empty(true, n_));
      ++n_;
      round_probs(score, prob);
#pragma unroll
      for (int i = 0; i < kSums; ++i) acc[i] *= alpha[i / 2 % 2];
    }
    arrive(shared_.query_empty());
    ptx::barrier_wait(shared_.full(true, n_), n_ / C::kStages % 2);
    ptx::fence_registers(acc);
    multiply_pv(prob, acc);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(acc);
    ptx::fence_registers(prob);
    arrive(shared_.empty(true, n_));
    ++n_;
  }

  __device__ __forceinline__ void multiply_qk(uint32_t n, float (&score)[kScores]) const {
    const uint64_t a = ptx::wgmma_operand(queries_), b = ptx::wgmma_operand(shared_.keys(n));
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < C::kDim / 16; ++s) {
      ptx::wgmma_16bit<Element, 0, 0>(score, a + s / 4 * (C::kQueryPartBytes / 16) + s % 4 * 2,
                                      b + s / 4 * (C::kKeyPartBytes / 16) + s % 4 * 2, s > 0);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void multiply_pv(const uint32_t (&prob)[kSteps][4], float (&acc)[kSums]) const {
    const uint64_t b = ptx::wgmma_transposed_operand(shared_.values(n_), C::kKeyPartBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      ptx::wgmma_16bit<Element, 1>(acc, prob[s], b + s * (16 * ptx::kSwizzleRowBytes / 16), true);
    }
    ptx::wgmma_commit();
  }

  // Scores become probabilities; alpha: by what accumulators are rescaled. row_max_ is in units of the scores
  // that come in, times factor it is a power of two.
  __device__ __forceinline__ void softmax(int32_t tile, float (&score)[kScores], float (&alpha)[2]) {
    const FlashShape& s = p_.shape;
    float factor = s.scale_log2;
    if (s.softcap > 0.0f || factor < 0.0f) {
      if (s.softcap > 0.0f) {
        const float in = s.scale / s.softcap, out = s.softcap * kFlashLog2e;
#pragma unroll
        for (int i = 0; i < kScores; ++i) score[i] = out * flash_tanh(score[i] * in);
      } else {
#pragma unroll
        for (int i = 0; i < kScores; ++i) score[i] *= factor;
      }
      factor = 1.0f;
    }
    if (tile * C::kTileKeys < whole_first_ || (tile + 1) * C::kTileKeys > whole_past_) mask(tile, score);
    float new_max[2] = {row_max_[0], row_max_[1]};
#pragma unroll
    for (int i = 0; i < kScores; ++i) new_max[i / 2 % 2] = fmaxf(new_max[i / 2 % 2], score[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      new_max[r] = flash_quad_max(new_max[r]);
      const float base = new_max[r] == -INFINITY ? 0.0f : new_max[r] * factor;
      alpha[r] = ptx::exp2_approx(fmaf(row_max_[r], factor, -base));
      row_max_[r] = new_max[r];
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
  __device__ __forceinline__ void mask(int32_t tile, float (&score)[kScores]) const {
    const int32_t from = tile * C::kTileKeys + static_cast<int32_t>(threadIdx.x % 4 * 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t low = first_key_[r] - from, past = past_key_[r] - from;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        const int column = i / 2 * 8 + i % 2;
        float& s = score[i / 2 * 4 + 2 * r + i % 2];
        s = column >= low && column < past ? s : -INFINITY;
      }
    }
  }
  __device__ __forceinline__ static void round_probs(const float (&score)[kScores],
                                                     uint32_t (&prob)[kSteps][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i)
      prob[i / 4][i % 4] = flash_pack<Element>(score[2 * i], score[2 * i + 1]);
  }

  // The sink joins, out and lse are stored: a lane has eight columns of every 32.
  __device__ __forceinline__ void epilogue(const FlashSequence& seq, int32_t b, int32_t head,
                                           float (&acc)[kSums]) {
    const FlashShape& s = p_.shape;
    const float factor = s.softcap > 0.0f || s.scale_log2 < 0.0f ? 1.0f : s.scale_log2;
    const float sink = s.sinks != nullptr ? __ldg(s.sinks + head) * kFlashLog2e : -INFINITY;
    const int t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float row_max = row_max_[r] == -INFINITY ? -INFINITY : row_max_[r] * factor;
      const float all = fmaxf(row_max, sink), base = all == -INFINITY ? 0.0f : all;
      const float mine = ptx::exp2_approx(row_max - base);
      const float sum = fmaf(flash_quad_sum(row_sum_[r]), mine, ptx::exp2_approx(sink - base));
      const float inverse = sum > 0.0f ? mine / sum : sum == 0.0f ? 0.0f : sum;
      const bool stored = query_[r] < seq.q_len;
      if (p_.lse != nullptr && stored && t == 0) {
        p_.lse[flash_lse_at(s, b, seq.q_start, head) + query_[r]] =
            sum == 0.0f ? -INFINITY : fmaf(base, kFlashLn2, logf(sum));
      }
      Element* out =
          static_cast<Element*>(p_.out) + flash_row_at(p_.out_strides, b, seq.q_start, query_[r], head);
#pragma unroll
      for (int i = 0; i < C::kDimV / 32; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* x = acc + 16 * i + 4 * j + 2 * r;
          words[j] = flash_pack<Element>(x[0] * inverse, x[1] * inverse);
        }
        flash_quad_transpose(words);
        if (stored)
          *reinterpret_cast<uint4*>(out + 32 * i + 8 * t) = uint4{words[0], words[1], words[2], words[3]};
      }
    }
  }

  const FlashForwardParams& p_;
  const FlashForwardShared<C> shared_;
  const int warpgroup_;
  uint8_t* queries_;
  uint32_t n_ = 0;  // tiles so far
  int32_t query_[2], first_key_[2], past_key_[2];
  int32_t whole_first_, whole_past_;
  float row_max_[2], row_sum_[2];  // row_sum_ is this lane's part
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
    ptx::more_registers<C::kConsumerRegisters>();
    FlashForwardConsumer<C>(p, shared).run();
  } else {
    ptx::fewer_registers<C::kProducerRegisters>();
    if (threadIdx.x / kWarpLanes == C::kConsumers * ptx::kWarpgroupWarps)
      FlashForwardProducer<C>(p, shared).run();
  }
#else
  __trap();
#endif
}

template <class C>
void launch_flash_forward_as(FlashForwardParams& p, const mr_flash_problem& problem, const mr_flash_tensor& q,
                             const mr_flash_tensor& k, const mr_flash_tensor& v, const Launch& at) {
  const Device& device = at.device;
  const int bytes = sizeof(typename C::Element);
  const bool ragged_k = problem.cu_k != nullptr;
  p.q = flash_map(device, q, bytes, problem.cu_q != nullptr, C::kDim, problem.max_q, problem.heads,
                  problem.batch, C::kRows);
  if (problem.max_k == 0) {
    // Nothing is loaded, and there may be no memory to point to.
  } else if (problem.pages != nullptr) {
    p.box_rows = 16;
    for (const int32_t rows : {32, 64, 128}) {
      if (problem.page_tokens % rows == 0 && C::kTileKeys % rows == 0) p.box_rows = rows;
    }
    const auto box = static_cast<uint32_t>(p.box_rows);
    p.k = flash_page_map(device, k, bytes, C::kDim, problem.kv_heads, box);
    p.v = flash_page_map(device, v, bytes, C::kDimV, problem.kv_heads, box);
  } else {
    p.k = flash_map(device, k, bytes, ragged_k, C::kDim, problem.max_k, problem.kv_heads, problem.batch,
                    C::kTileKeys);
    p.v = flash_map(device, v, bytes, ragged_k, C::kDimV, problem.max_k, problem.kv_heads, problem.batch,
                    C::kTileKeys);
  }
  const int64_t tiles = (problem.max_q + C::kRows - 1) / C::kRows;
  p.schedule.tiles = static_cast<int32_t>(tiles);
  // Half of L2 (50 MB) for a section's keys and values.
  const int64_t head_bytes = int64_t{problem.max_k} * (C::kDim + C::kDimV) * bytes;
  const int64_t kv_heads = std::max<int64_t>(1, (int64_t{24} << 20) / std::max<int64_t>(1, head_bytes));
  p.schedule.section = static_cast<int32_t>(
      std::min<int64_t>(kv_heads * p.shape.group, int64_t{problem.batch} * problem.heads));
  flash_plan_kernel<<<1, kFlashPlanThreads, 0, at.stream>>>(problem.cu_q, problem.batch, C::kRows,
                                                            p.schedule.counter, p.schedule.tile_starts);
  check_launch("flash_plan_kernel");
  const auto kernel = flash_forward_kernel<C>;
  allow_shared_memory(kernel, C::kSharedBytes);
  const int64_t items = tiles * problem.batch * problem.heads;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(items, device.sm_count()));
  kernel<<<grid, C::kThreads, C::kSharedBytes, at.stream>>>(p);
  check_launch("flash_forward_kernel");
}

}  // namespace millrace::cuda
