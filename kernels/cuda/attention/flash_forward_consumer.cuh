// The consumers of the forward kernel, and the kernel. See flash_forward.cuh.
#pragma once

#include "kernels/cuda/attention/flash_forward.cuh"

namespace millrace::cuda {

#ifdef MILLRACE_HAS_WGMMA

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
  // kCodes: every tile's P V has sums of its own.
  static constexpr int kPartSums = C::kCodes ? kSums : 1;
  // Three warpgroups hide one another's latencies, and have no registers for two tiles of a window at once.
  static constexpr bool kSerial = C::kWindow && C::kConsumers == 3;
  static constexpr float kShift = C::kCodes ? 8.0f : 0.0f;  // log2 of what a row's largest probability is

 public:
  __device__ FlashForwardConsumer(const FlashForwardParams& p, uint8_t* shared)
      : p_(p),
        shared_{shared},
        warpgroup_(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / ptx::kWarpgroupThreads), 0)) {
    const auto thread = static_cast<int32_t>(threadIdx.x % ptx::kWarpgroupThreads);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      token_[r] = (warpgroup_ * 64 + thread / kWarpLanes * 16 + thread % kWarpLanes / 4 + 8 * r) / p.pack;
    }
    first_token_ = warpgroup_ * 64 / p.pack, last_token_ = (warpgroup_ * 64 + 63) / p.pack;
  }

  __device__ __forceinline__ void run() {
    if (C::kTakeTurns && warpgroup_ == 1) pass_turn();  // the first turn is warpgroup 0's
    float acc[kSums];
    while (begin_item()) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) acc[i] = 0.0f;
      if (tiles_ > 0) {
        if constexpr (kSerial) {
          mainloop_of_windows(acc);
        } else if constexpr (C::kOverItems) {
          mainloop_over_items(acc);
        } else {
          shared_.rings().queries.wait_full(QueryRound::at(n_queries_));
          if constexpr (C::kCodes) {
            mainloop_of_codes(acc);
          } else {
            mainloop(acc);
          }
          ++n_queries_;
        }
      }
      finish_item(row_max_, row_sum_, acc);
    }
  }

 private:
  using ItemRound = tile::Cursor<C::kItemSlots>;

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
  __device__ __forceinline__ FlashSchedule::Item item_of(uint32_t round) const {
    const int4 item = *shared_.item(round);
    return {item.x, item.y, item.z, item.w};
  }

  // Waits for the next item; false after the last. It stays in its slot until finish_item.
  __device__ __forceinline__ bool begin_item() {
    shared_.rings().items.wait_full(ItemRound::at(n_items_));
    const FlashSchedule::Item at = item_of(n_items_);
    if (at.b < 0) return false;
    const FlashSequence seq(p_.shape, at.b);
    begin_rows(seq, at, FlashKeyTiles<C>(p_, seq, at));
    return true;
  }
  // The same for the item behind this one while this one is in use; false too where it has no keys, and
  // nothing has changed then.
  __device__ __forceinline__ bool begin_next_item() {
    shared_.rings().items.wait_full(ItemRound::at(n_items_ + 1));
    const FlashSchedule::Item at = item_of(n_items_ + 1);
    if (at.b < 0) return false;
    const FlashSequence seq(p_.shape, at.b);
    const FlashKeyTiles<C> tiles(p_, seq, at);
    if (tiles.past == tiles.first) return false;
    begin_rows(seq, at, tiles);
    return true;
  }
  __device__ __forceinline__ void finish_item(const float (&row_max)[2], const float (&row_sum)[2],
                                              const float (&acc)[kSums]) {
    const FlashSchedule::Item at = item_of(n_items_);
    const FlashSequence seq(p_.shape, at.b);
    if (C::kConsumers == 1 && p_.partial_out != nullptr) {
      store_partial(seq, at, row_max, row_sum, acc);
    } else {
      store(seq, at, row_max, row_sum, acc);
    }
    __syncwarp();  // all lanes have read it
    leave(shared_.rings().items, ItemRound::at(n_items_));
    ++n_items_;
  }

  __device__ __forceinline__ void begin_rows(const FlashSequence& seq, const FlashSchedule::Item& at,
                                             const FlashKeyTiles<C>& tiles) {
    const int32_t first = at.tile * p_.tile_tokens;
    tile_ = tiles.past, tiles_ = tiles.past - tiles.first;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      first_key_[r] = seq.first_key(p_.shape, first + token_[r]);
      past_key_[r] = seq.past_key(p_.shape, first + token_[r]);
      row_max_[r] = -INFINITY, row_sum_[r] = 0.0f;
    }
    // Keys that all 64 rows see.
    whole_first_ = seq.first_key(p_.shape, first + last_token_);
    whole_past_ = seq.past_key(p_.shape, first + first_token_);
    if constexpr (C::kWindow) {
      begin_ = seq.first_key(p_.shape, first + first_token_) & ~15;
      skipped_ = static_cast<uint32_t>(begin_ - tiles.begin);
    }
    if constexpr (C::kCodes) begin_scales(seq, at);
  }
  __device__ __forceinline__ void begin_scales(const FlashSequence& seq, const FlashSchedule::Item& at) {
    const FlashShape& s = p_.shape;
    const int32_t kv_head = p_.pack > 1 ? at.head : at.head / s.group;
    const int64_t blocks = (int64_t{at.b} * s.kv_heads + kv_head) * p_.key_blocks;
    k_scales_ = p_.k_scales + blocks, v_scales_ = p_.v_scales + blocks;
    const int64_t first = s.cu_q != nullptr ? seq.q_start : int64_t{at.b} * s.max_q;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t query = at.tile * p_.tile_tokens + token_[r];
      q_factor_[r] = s.scale_log2;
      if (query < seq.q_len) q_factor_[r] *= p_.q_scales[(first + query) * s.heads + head_of(at, r)];
    }
  }

  __device__ __forceinline__ void mainloop(float (&acc)[kSums]) {
    const int32_t past = tile_, first = tile_ - tiles_;
    float score[kScores], alpha[2];
    uint32_t prob[kSteps][4];
    float none[kPartSums];
    key_ring().wait_full(Round::at(n_));
    multiply_qk(n_, score);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(score);
    const int2 keys = keys_of(past - 1, n_);
    leave(key_ring(), Round::at(n_));
    softmax(keys, {}, score, alpha);
    round_probs(score, prob);
    for (int32_t tile = past - 2; tile >= first; --tile) {
      key_ring().wait_full(Round::at(n_ + 1));
      wait_turn();
      ptx::fence_registers(acc);
      multiply_qk(n_ + 1, score);
      value_ring().wait_full(Round::at(n_));
      multiply_pv(prob, 0, acc, none);
      pass_turn();
      ptx::wgmma_wait<1>();
      ptx::fence_registers(score);
      const int2 next = keys_of(tile, n_ + 1);
      leave(key_ring(), Round::at(n_ + 1));
      softmax(next, {}, score, alpha);
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
    multiply_pv(prob, 0, acc, none);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(acc);
    ptx::fence_registers(prob);
    leave(value_ring(), Round::at(n_));
    ++n_;
  }

  // As mainloop, but every tile's P V has sums of its own.
  __device__ __forceinline__ void mainloop_of_codes(float (&acc)[kSums]) {
    const int32_t past = tile_, first = tile_ - tiles_;
    float score[kScores], part[kPartSums], alpha[2];
    uint32_t prob[kSteps][4];
    float2 scales = scales_of(past - 1);
    key_ring().wait_full(Round::at(n_));
    multiply_qk(n_, score);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(score);
    leave(key_ring(), Round::at(n_));
    softmax_of_codes((past - 1) * C::kTileKeys, scales, score, alpha);
    round_probs(score, prob);
    for (int32_t tile = past - 2; tile >= first; --tile) {
      scales = scales_of(tile);
      key_ring().wait_full(Round::at(n_ + 1));
      wait_turn();
      multiply_qk(n_ + 1, score);
      value_ring().wait_full(Round::at(n_));
      multiply_pv(prob, 0, acc, part);
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
    multiply_pv(prob, 0, acc, part);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(part);
    ptx::fence_registers(prob);
    leave(value_ring(), Round::at(n_));
    ++n_;
    add_part(alpha, part, acc);
  }
  // Where the tile's keys begin, and of a list its second half.
  __device__ __forceinline__ int2 keys_of(int32_t tile, uint32_t n) const {
    if constexpr (!C::kSparse) return {tile * C::kTileKeys, 0};
    const int2 halves = *shared_.tile_keys(n);
    __syncwarp();  // all lanes have read it
    return halves;
  }
  // From an item's first tile on, over items while the next one has keys: its first scores are computed under
  // the last P V of the one before, whose rows are stored then. Leaves the last item's in acc.
  __device__ __forceinline__ void mainloop_over_items(float (&acc)[kSums]) {
    float score[kScores], alpha[2];
    uint32_t prob[kSteps][4];
    float part[kPartSums];
    const float2 scales = scales_of(tile_ - 1);
    shared_.rings().queries.wait_full(QueryRound::at(n_queries_));
    key_ring().wait_full(Round::at(n_));
    multiply_qk(n_, score);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(score);
    const int2 keys = next_tile(n_);
    softmax(keys, scales, score, alpha);
    round_probs(score, prob);
    for (;;) {
      while (!C::kWindow && tiles_ > 0) {
        step<false>(row_max_, row_sum_, skipped_, prob, score, alpha, acc, part);
      }
      const float row_max[2] = {row_max_[0], row_max_[1]}, row_sum[2] = {row_sum_[0], row_sum_[1]};
      const uint32_t skipped = skipped_;
      if (!begin_next_item()) break;
      shared_.rings().queries.wait_full(QueryRound::at(n_queries_));
      step<true>(row_max, row_sum, skipped, prob, score, alpha, acc, part);
    }
    value_ring().wait_full(Round::at(n_));
    ptx::fence_registers(acc);
    multiply_pv(prob, skipped_, acc, part);
    ptx::wgmma_wait<0>();
    C::kCodes ? ptx::fence_registers(part) : ptx::fence_registers(acc);
    ptx::fence_registers(prob);
    leave(value_ring(), Round::at(n_));
    ++n_;
    add_part(alpha, part, acc);
  }
  // kWindow, a tile an item: its scores are computed while the rows of the item before are stored. Leaves the
  // last item's in acc.
  __device__ __forceinline__ void mainloop_of_windows(float (&acc)[kSums]) {
    float score[kScores], alpha[2], none[kPartSums], row_max[2], row_sum[2];
    uint32_t prob[kSteps][4];
    for (bool first = true;; first = false) {
      shared_.rings().queries.wait_full(QueryRound::at(n_queries_));
      key_ring().wait_full(Round::at(n_));
      multiply_qk(n_, score);
      if (!first) finish_item(row_max, row_sum, acc);
      ptx::wgmma_wait<0>();
      ptx::fence_registers(score);
      softmax(next_tile(n_), {}, score, alpha);
      round_probs(score, prob);
      value_ring().wait_full(Round::at(n_));
      ptx::fence_registers(acc);
      multiply_pv(prob, skipped_, acc, none);
#pragma unroll
      for (int r = 0; r < 2; ++r) row_max[r] = row_max_[r], row_sum[r] = row_sum_[r];
      const bool more = begin_next_item();
      ptx::wgmma_wait<0>();
      ptx::fence_registers(acc);
      ptx::fence_registers(prob);
      leave(value_ring(), Round::at(n_));
      ++n_;
      if (!more) break;
    }
  }
  // P V of a tile, and the scores and probabilities of the next one under it. kEnds: that is the first of the
  // next item, and of this one, whose row_max and row_sum these are, P V was the last.
  template <bool kEnds>
  __device__ __forceinline__ void step(const float (&row_max)[2], const float (&row_sum)[2], uint32_t skipped,
                                       uint32_t (&prob)[kSteps][4], float (&score)[kScores],
                                       float (&alpha)[2], float (&acc)[kSums], float (&part)[kPartSums]) {
    const float2 scales = scales_of(tile_ - 1);
    key_ring().wait_full(Round::at(n_ + 1));
    wait_turn();
    ptx::fence_registers(acc);
    multiply_qk(n_ + 1, score);
    value_ring().wait_full(Round::at(n_));
    multiply_pv(prob, skipped, acc, part);
    pass_turn();
    ptx::wgmma_wait<1>();
    ptx::fence_registers(score);
    const int2 next = next_tile(n_ + 1);
    float new_alpha[2];
    softmax(next, scales, score, new_alpha);
    ptx::fence_registers(score);
    if constexpr (C::kCodes) {
      // The assembler would have the exponentials wait for P V, but not across a branch. Sums are not
      // negative.
      if (row_sum_[0] < 0.0f || row_sum_[1] < 0.0f) ptx::sleep_for_nothing();
    }
    ptx::wgmma_wait<0>();
    C::kCodes ? ptx::fence_registers(part) : ptx::fence_registers(acc);
    ptx::fence_registers(prob);
    leave(value_ring(), Round::at(n_));
    ++n_;
    add_part(alpha, part, acc);
    if constexpr (kEnds) {
      finish_item(row_max, row_sum, acc);
      round_probs(score, prob);
#pragma unroll
      for (int i = 0; i < kSums; ++i) acc[i] = 0.0f;
    } else {
      round_probs(score, prob);
      if constexpr (!C::kCodes) rescale(new_alpha, acc);
    }
    alpha[0] = new_alpha[0], alpha[1] = new_alpha[1];
  }
  // Scores of the item's next tile are there, in round n of the keys: where its keys begin, and of a list its
  // second half.
  __device__ __forceinline__ int2 next_tile(uint32_t n) {
    int2 keys{C::kWindow ? begin_ : --tile_ * C::kTileKeys, 0};
    if constexpr (C::kSparse) {
      keys = *shared_.tile_keys(n);
      __syncwarp();  // all lanes have read it
    }
    leave(key_ring(), Round::at(n));
    if (--tiles_ == 0) {
      leave(shared_.rings().queries, QueryRound::at(n_queries_));
      ++n_queries_;
    }
    return keys;
  }
  // kCodes: of the tile's keys and values.
  __device__ __forceinline__ float2 scales_of(int32_t tile) const {
    if constexpr (C::kCodes) return {__ldg(k_scales_ + tile), __ldg(v_scales_ + tile)};
    return {};
  }
  __device__ __forceinline__ static void add_part(const float (&alpha)[2], const float (&part)[kPartSums],
                                                  float (&acc)[kSums]) {
    if constexpr (C::kCodes) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) acc[i] = fmaf(acc[i], alpha[i / 2 % 2], part[i]);
    }
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
                   b = ptx::wgmma_operand(shared_.keys(n) +
                                          (C::kWindow ? skipped_ : 0) * ptx::kSwizzleRowBytes);
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
  // skipped: kWindow, rows of keys before this warpgroup's. kCodes: sums of their own, in part.
  __device__ __forceinline__ void multiply_pv(const uint32_t (&prob)[kSteps][4], uint32_t skipped,
                                              float (&acc)[kSums], float (&part)[kPartSums]) const {
    const uint8_t* values = shared_.values(n_) + (C::kWindow ? skipped : 0) * ptx::kSwizzleRowBytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if constexpr (C::kCodes) {
        ptx::wgmma_e4m3(part, prob[s], ptx::wgmma_operand(values) + s * 2, s > 0);
      } else {
        ptx::wgmma_16bit<Element, 1>(
            acc, prob[s],
            ptx::wgmma_transposed_operand(values, C::kKeyPartBytes) + s * (16 * ptx::kSwizzleRowBytes / 16),
            !C::kWindow || s > 0);
      }
    }
    ptx::wgmma_commit();
  }

  // Scores become probabilities; alpha: by what accumulators are rescaled. row_max_: log2.
  __device__ __forceinline__ void softmax(const int2& keys, const float2& scales, float (&score)[kScores],
                                          float (&alpha)[2]) {
    if constexpr (C::kCodes) {
      softmax_of_codes(keys.x, scales, score, alpha);
      return;
    }
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
  // Chunk by chunk of columns, since most are seen by all rows.
  __device__ __forceinline__ void mask(const int2& keys, float (&score)[kScores]) const {
    constexpr int kChunk = C::kWindow ? 16 : C::kOverItems ? 32 : C::kTileKeys;
    const int32_t in_eight = static_cast<int32_t>(threadIdx.x % 4 * 2);
#pragma unroll
    for (int c = 0; c < C::kTileKeys / kChunk; ++c) {
      const int32_t chunk = keys.x + c * kChunk;
      if (C::kOverItems && chunk >= whole_first_ && chunk + kChunk <= whole_past_) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int32_t low = first_key_[r] - keys.x - in_eight, past = past_key_[r] - keys.x - in_eight;
#pragma unroll
        for (int i = 0; i < kChunk / 4; ++i) {
          const int column = c * kChunk + i / 2 * 8 + i % 2;
          if (C::kSparse && column == 64) {
            low = first_key_[r] - (keys.y - 64 + in_eight), past = past_key_[r] - (keys.y - 64 + in_eight);
          }
          float& s = score[column / 8 * 4 + 2 * r + i % 2];
          s = column >= low && column < past ? s : -INFINITY;
        }
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
    const auto thread = static_cast<int32_t>(threadIdx.x % ptx::kWarpgroupThreads);
    const int32_t row = warpgroup_ * 64 + thread / kWarpLanes * 16 + thread % kWarpLanes / 4 + 8 * r;
    return at.head * p_.pack + row - token_[r] * p_.pack;
  }

  // The sink joins, out and lse are stored: a lane has eight columns of every 32.
  __device__ __forceinline__ void store(const FlashSequence& seq, const FlashSchedule::Item& at,
                                        const float (&row_max)[2], const float (&row_sum)[2],
                                        const float (&acc)[kSums]) const {
    const FlashShape& s = p_.shape;
    const int t = static_cast<int>(threadIdx.x % 4);
    float sink[2], inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sink[r] = s.sinks != nullptr ? __ldg(s.sinks + head_of(at, r)) * kFlashLog2e : -INFINITY;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t query = at.tile * p_.tile_tokens + token_[r];
      const float largest = row_max[r] - kShift;
      const float all = fmaxf(largest, sink[r]), base = all == -INFINITY ? 0.0f : all;
      const float mine = ptx::exp2_approx(largest - base);
      const float sum = fmaf(tile::quad_sum(row_sum[r]), mine, ptx::exp2_approx(sink[r] - base));
      inverse[r] = sum > 0.0f ? mine * ptx::reciprocal_approx(sum) : sum == 0.0f ? 0.0f : sum;
      if (p_.lse != nullptr && query < seq.q_len && t == 0) {
        p_.lse[flash_lse_at(s, at.b, seq.q_start, head_of(at, r)) + query] =
            sum == 0.0f ? -INFINITY : (base + __log2f(sum)) * kFlashLn2;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t query = at.tile * p_.tile_tokens + token_[r];
      auto* out = static_cast<typename C::Output*>(p_.out) +
                  flash_row_at(p_.out_strides, at.b, seq.q_start, query, head_of(at, r)) + 8 * t;
#pragma unroll
      for (int i = 0; i < C::kDimV / 32; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* x = acc + 16 * i + 4 * j + 2 * r;
          words[j] = flash_pack<typename C::Output>(x[0] * inverse[r], x[1] * inverse[r]);
        }
        flash_quad_transpose(words);
        if (query < seq.q_len && 32 * i + 8 * t < p_.value_dim) {
          *reinterpret_cast<uint4*>(out + 32 * i) = uint4{words[0], words[1], words[2], words[3]};
        }
      }
    }
  }

  // Of a split: out before the sink joins, and the log2 of its sum.
  __device__ __forceinline__ void store_partial(const FlashSequence& seq, const FlashSchedule::Item& at,
                                                const float (&row_max)[2], const float (&row_sum)[2],
                                                const float (&acc)[kSums]) const {
    const FlashShape& s = p_.shape;
    const int t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t query = at.tile * p_.tile_tokens + token_[r];
      const float sum = tile::quad_sum(row_sum[r]), inverse = sum > 0.0f ? 1.0f / sum : sum;
      if (query >= seq.q_len) continue;
      const int64_t row = (int64_t{at.b} * s.heads + head_of(at, r)) * s.max_q + query;
      const int64_t to = row * p_.schedule.splits + at.split;
      if (t == 0) {
        p_.partial_lse[to] = sum == 0.0f ? -INFINITY : row_max[r] - kShift + log2f(sum);
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
  uint32_t n_ = 0, n_queries_ = 0, n_items_ = 0;  // tiles, items with tiles, items so far
  int32_t tile_, tiles_;                          // of the item: past the next one, and how many are left
  int32_t token_[2], first_token_, last_token_;   // of rows in their tile
  int32_t first_key_[2], past_key_[2];
  int32_t whole_first_, whole_past_;
  // kWindow: where this warpgroup's keys begin, in the sequence and in the stage.
  int32_t begin_;
  uint32_t skipped_ = 0;
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
