// Prefill attention on Hopper's warpgroup products: many rows that follow one another, with the numerics of
// paged_tile.cuh to the bit.
//
// A persistent CTA loops over its work items (chunk of a sequence, KV head). Two producer warps load tiles of
// 128 positions by bulk copies, one the keys and one the values; the cache is kept in the order in which the
// tensor cores take both. Three consumer warpgroups (two for 128 dimensions) have 64 rows of the product
// each: a row is one query head of one token, so that a KV head's keys serve all its query heads. Q K^T of
// the next tile and P V of this one are multiplied while the softmax of the next tile waits for its scores,
// and while the other warpgroups compute theirs. Only tiles at the edge of what a row sees are masked. The
// accumulators of the splits before lie in shared memory: they are needed once in four tiles. Of an fp8 cache
// codes come into the upper halves of a stage's pages, and four warps, two for the keys and two for the
// values, convert them to bf16 in place: the products do not know of it.
//
// Roofline: 4 x 64 x 128 x dim operations per warpgroup and tile: 512 cycles of the tensor cores at dim 64,
// beside 512 cycles of the unit that computes exponentials (16 a cycle) and some 350 of everything else.
#include <algorithm>

#include "kernels/cuda/attention/prefill_producer.cuh"

namespace millrace::cuda {
namespace {

#ifdef MILLRACE_HAS_WGMMA

// A warpgroup's 64 rows. Lane (g, t) of warp w has rows 16w + g and 16w + g + 8, of a tile's scores columns
// 8j + 2t and + 1.
template <int kDim, bool kFp8>
class PrefillConsumer {
  using Shape = PrefillShape<kDim, kFp8>;
  static constexpr int kAccumulators = kDim / 2;
  static constexpr int kChunks = kDim / 8, kQueryLoads = kWarpgroupRows * kChunks / ptx::kWarpgroupThreads;

 public:
  __device__ PrefillConsumer(const PagedAttention& p, uint8_t* shared)
      : p_(p),
        keys_(shared, false),
        values_(shared, true),
        warpgroup_(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / ptx::kWarpgroupThreads), 0)),
        thread_(threadIdx.x % ptx::kWarpgroupThreads),
        queries_(shared + Shape::kQueriesAt + warpgroup_ * Shape::kQueryBytes),
        out_(reinterpret_cast<float4*>(shared + Shape::kOutAt + warpgroup_ * Shape::kOutBytes) + thread_),
        group_(p.cache.heads / p.cache.kv_heads) {}

  __device__ __forceinline__ void run(const PrefillItems& items) {
    float4 raw[kQueryLoads][2];
    load_queries(items.at(0), raw);
    for (int32_t round = 0; items.has(round); ++round) {
      const PrefillItem item = items.at(round);
      store_queries(raw);
      const bool more = items.has(round + 1);
      mainloop(item, more ? items.at(round + 1) : item, raw);
    }
  }

 private:
  __device__ int first_row() const { return warpgroup_ * kWarpgroupRows; }
  // Among the threads of this warpgroup.
  __device__ void sync() const { ptx::named_barrier<ptx::kWarpgroupThreads>(1 + warpgroup_); }

  // One item, tile by tile: the products of the next tile's Q K^T and of this one's P V are under way while
  // the softmax of the next is computed. Leaves the queries of the next item in `raw`: on their way while
  // this one's last are added and stored.
  __device__ __forceinline__ void mainloop(const PrefillItem& item, const PrefillItem& next,
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
    begin_item(item);
    float score[kKeyTile / 2], acc[kAccumulators];
    uint32_t prob[kTilePages][4];
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) acc[i] = 0.0f;

    keys_.wait_full(n_);
    multiply_qk(n_, score);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(score);
    keys_.release(n_);
    float alpha[2];
    softmax(first_tile, score, alpha);
    round_probs(score, prob);
    if (tiles > 1) keys_.wait_full(n_ + 1);
    for (int32_t tile = first_tile + 1; tile < past_tile; ++tile) {
      ptx::fence_registers(acc);
      multiply_qk(n_ + 1, score);
      values_.wait_full(n_);
      multiply_pv(prob, acc);
      ptx::wgmma_wait<1>();
      ptx::fence_registers(score);
      keys_.release(n_ + 1);
      const bool next_split = tile % kSplitTiles == 0;
      const float row_max[2] = {row_max_[0], row_max_[1]}, row_sum[2] = {row_sum_[0], row_sum_[1]};
      if (next_split) begin_split();
      softmax(tile, score, alpha);
      // Here, since the assembler would have the softmax wait for P V; not over this loop.
      ptx::fence_registers(score);
      if (tile + 1 < past_tile) keys_.wait_full(n_ + 2);
      ptx::wgmma_wait<0>();
      ptx::fence_registers(acc);
      ptx::fence_registers(prob);
      values_.release(n_);
      ++n_;
      round_probs(score, prob);
      if (next_split) {
        end_split(row_max, row_sum, acc);
      } else {
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) acc[i] *= alpha[i / 2 % 2];
      }
    }
    values_.wait_full(n_);
    ptx::fence_registers(acc);
    multiply_pv(prob, acc);
    load_queries(next, raw);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(acc);
    ptx::fence_registers(prob);
    values_.release(n_);
    ++n_;
    epilogue(item, acc);
  }

  // Rows past the last token are zeros.
  __device__ __forceinline__ void load_queries(const PrefillItem& item, float4 (&raw)[kQueryLoads][2]) const {
    const float* from = p_.query + (int64_t{item.first_row} * p_.cache.heads + item.kv_head * group_) * kDim;
#pragma unroll
    for (int i = 0; i < kQueryLoads; ++i) {
      const int at = i * ptx::kWarpgroupThreads + thread_, row = first_row() + at / kChunks;
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
    sync();  // the warpgroup's products with the last item's queries are done
    const float scale = p_.op.scale * kLog2e;
#pragma unroll
    for (int i = 0; i < kQueryLoads; ++i) {
      const int at = i * ptx::kWarpgroupThreads + thread_, row = at / kChunks, chunk = at % kChunks;
      const float4 a = raw[i][0], b = raw[i][1];
      *reinterpret_cast<uint4*>(
          queries_ + chunk / 8 * Shape::kQueryPartBytes +
          ptx::swizzled(static_cast<uint32_t>(row), static_cast<uint32_t>(chunk % 8 * 16))) =
          uint4{pack_bf16(a.x * scale, a.y * scale), pack_bf16(a.z * scale, a.w * scale),
                pack_bf16(b.x * scale, b.y * scale), pack_bf16(b.z * scale, b.w * scale)};
    }
    ptx::publish_to_async();
    sync();  // all of the warpgroup's rows are there
  }

  __device__ void begin_item(const PrefillItem& item) {
    const int lane = thread_ % kWarpLanes;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row() + thread_ / kWarpLanes * 16 + lane / 4 + 8 * r;
      visible_[r] = visible_keys(item.position + row / group_, p_.op.window);
      combined_[r] = SplitCombine{};
    }
    // Tiles that all rows of the warpgroup see all of need no mask.
    const int32_t first_token = first_row() / group_,
                  last_token = (first_row() + kWarpgroupRows - 1) / group_;
    first_whole_ = (visible_keys(item.position + last_token, p_.op.window).first + kKeyTile - 1) / kKeyTile;
    past_whole_ = (item.position + first_token + 1) / kKeyTile;
    begin_split();
#pragma unroll
    for (int i = 0; i < kAccumulators / 4; ++i) out_[i * ptx::kWarpgroupThreads] = float4{0, 0, 0, 0};
  }
  __device__ void begin_split() {
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max_[r] = -INFINITY, row_sum_[r] = 0.0f;
  }

  __device__ __forceinline__ void multiply_qk(uint32_t n, float (&score)[kKeyTile / 2]) const {
    const uint64_t a = ptx::wgmma_operand(queries_), b = ptx::wgmma_operand(keys_.stage(n));
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kDim / 16; ++s) {
      ptx::wgmma_bf16(score, a + s / 4 * (Shape::kQueryPartBytes / 16) + s % 4 * 2,
                      b + s / 4 * (kTilePartBytes / 16) + s % 4 * 2, s > 0);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void multiply_pv(const uint32_t (&prob)[kTilePages][4],
                                              float (&acc)[kAccumulators]) const {
    const uint64_t b = ptx::wgmma_transposed_operand(values_.stage(n_), kTilePartBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int page = 0; page < kTilePages; ++page) {
      ptx::wgmma_bf16_transposed(acc, prob[page], b + page * (kPagePartBytes / 16));
    }
    ptx::wgmma_commit();
  }

  // Scores become probabilities; alpha: by what accumulators and row_sum are rescaled.
  __device__ __forceinline__ void softmax(int32_t tile, float (&score)[kKeyTile / 2], float (&alpha)[2]) {
    if (tile < first_whole_ || tile >= past_whole_) mask(tile, score);
    float new_max[2] = {row_max_[0], row_max_[1]};
#pragma unroll
    for (int i = 0; i < kKeyTile / 2; ++i) new_max[i / 2 % 2] = fmaxf(new_max[i / 2 % 2], score[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      new_max[r] = quad_max(new_max[r]);
      const float base = softmax_base(new_max[r]);
      alpha[r] = ptx::exp2_approx(row_max_[r] - base);
      row_max_[r] = new_max[r];
      float sums[kTilePages];
#pragma unroll
      for (int page = 0; page < kTilePages; ++page) {
        float* p = score + 8 * page + 2 * r;
        p[0] = ptx::exp2_approx(p[0] - base), p[1] = ptx::exp2_approx(p[1] - base);
        p[4] = ptx::exp2_approx(p[4] - base), p[5] = ptx::exp2_approx(p[5] - base);
        sums[page] = (p[0] + p[1]) + (p[4] + p[5]);
      }
      row_sum_[r] =
          fmaf(row_sum_[r], alpha[r],
               ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7])));
    }
  }
  __device__ __forceinline__ void mask(int32_t tile, float (&score)[kKeyTile / 2]) const {
    const int32_t from = tile * kKeyTile + thread_ % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t low = visible_[r].first - from, high = visible_[r].last - from;
#pragma unroll
      for (int i = 0; i < kKeyTile / 4; ++i) {
        const int column = i / 2 * 8 + i % 2;
        float& s = score[i / 2 * 4 + 2 * r + i % 2];
        s = column >= low && column <= high ? s : -INFINITY;
      }
    }
  }
  __device__ __forceinline__ static void round_probs(const float (&score)[kKeyTile / 2],
                                                     uint32_t (&prob)[kTilePages][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kTilePages; ++i) {
      prob[i / 4][i % 4] = pack_bf16(score[2 * i], score[2 * i + 1]);
    }
  }

  // The split's accumulators are combined with those of the splits before and start again at zero.
  __device__ __forceinline__ void end_split(const float (&row_max)[2], const float (&row_sum)[2],
                                            float (&acc)[kAccumulators]) {
    const SplitCombine::Factors factors[2] = {combined_[0].add(row_max[0], quad_sum(row_sum[0])),
                                              combined_[1].add(row_max[1], quad_sum(row_sum[1]))};
#pragma unroll
    for (int i = 0; i < kAccumulators / 4; ++i) {
      float4 all = out_[i * ptx::kWarpgroupThreads];
      all.x = factors[0].combine(all.x, acc[4 * i]), all.y = factors[0].combine(all.y, acc[4 * i + 1]);
      all.z = factors[1].combine(all.z, acc[4 * i + 2]), all.w = factors[1].combine(all.w, acc[4 * i + 3]);
      out_[i * ptx::kWarpgroupThreads] = all;
      acc[4 * i] = acc[4 * i + 1] = acc[4 * i + 2] = acc[4 * i + 3] = 0.0f;
    }
  }

  // The last split and the sink are combined, out is stored.
  __device__ void epilogue(const PrefillItem& item, float (&acc)[kAccumulators]) {
    const int lane = thread_ % kWarpLanes;
    SplitCombine::Factors split[2], sink[2];
    float inv_row_sum[2];
    float* out[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row() + thread_ / kWarpLanes * 16 + lane / 4 + 8 * r;
      const int token = row / group_, head = item.kv_head * group_ + row % group_;
      split[r] = combined_[r].add(row_max_[r], quad_sum(row_sum_[r]));
      sink[r] = {1.0f, 0.0f};
      if (p_.op.sinks != nullptr) sink[r] = combined_[r].add(__ldg(p_.op.sinks + head) * kLog2e, 1.0f);
      inv_row_sum[r] = 1.0f / combined_[r].row_sum;
      out[r] = token < item.tokens
                   ? p_.out + (int64_t{item.first_row + token} * p_.cache.heads + head) * kDim + lane % 4 * 2
                   : nullptr;
    }
#pragma unroll
    for (int i = 0; i < kAccumulators / 4; ++i) {
      const float4 all = out_[i * ptx::kWarpgroupThreads];
      const float before[2][2] = {{all.x, all.y}, {all.z, all.w}};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float v[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          v[e] = split[r].combine(before[r][e], acc[4 * i + 2 * r + e]);
          v[e] = sink[r].combine(v[e], 0.0f) * inv_row_sum[r];
        }
        if (out[r] != nullptr) *reinterpret_cast<float2*>(out[r] + 8 * i) = {v[0], v[1]};
      }
    }
  }

  const PagedAttention& p_;
  const PrefillRing<kDim, kFp8> keys_, values_;
  const int warpgroup_, thread_;
  uint8_t* queries_;
  float4* out_;  // [.. of four accumulators][thread], of the splits before; in shared memory
  const int group_;
  uint32_t n_ = 0;  // tiles so far
  KeyRange visible_[2];
  int32_t first_whole_, past_whole_;
  float row_max_[2], row_sum_[2];  // of the split; row_sum_ is this lane's part
  SplitCombine combined_[2];       // of the splits before
};

#endif  // MILLRACE_HAS_WGMMA

template <int kDim, bool kFp8>
__global__ void __launch_bounds__((PrefillShape<kDim, kFp8>::kThreads), 1)
    prefill_attention_kernel(const __grid_constant__ PagedAttention p) {
#ifdef MILLRACE_HAS_WGMMA
  using Shape = PrefillShape<kDim, kFp8>;
  using Ring = PrefillRing<kDim, kFp8>;
  extern __shared__ __align__(1024) uint8_t shared[];
  if (threadIdx.x == 0) {
    Ring(shared, false).init();
    Ring(shared, true).init();
    ptx::barrier_init_fence();
  }
  const PrefillItems items{p, reinterpret_cast<int4*>(shared + Shape::kRecordsAt), Shape::kRecords};
  items.load_records();
  ptx::let_dependents_start();
  __syncthreads();  // the barriers and records are there
  ptx::wait_for_previous();
  if (threadIdx.x < Shape::kConsumers * ptx::kWarpgroupThreads) {
    ptx::more_registers<Shape::kConsumerRegisters>();
    PrefillConsumer<kDim, kFp8>(p, shared).run(items);
  } else {
    ptx::fewer_registers<Shape::kProducerRegisters>();
    const int warp = threadIdx.x % ptx::kWarpgroupThreads / kWarpLanes;
    if (warp < 2 * Shape::kProducerWarps) {
      if (warp % 2 == 0) produce_tiles<kDim, false>(p, items, Ring(shared, false), warp / 2);
      if (warp % 2 == 1) produce_tiles<kDim, true>(p, items, Ring(shared, true), warp / 2);
    }
  }
#else
  __trap();
#endif
}

template <int kDim, bool kFp8>
void launch_as(const PagedAttention& op, const Launch& at) {
  using Shape = PrefillShape<kDim, kFp8>;
  const auto kernel = prefill_attention_kernel<kDim, kFp8>;
  allow_shared_memory(kernel, Shape::kSharedBytes);
  const int64_t items = int64_t{op.num_chunks} * op.cache.kv_heads;
  launch_dependent("prefill_attention_kernel", kernel,
                   dim3(static_cast<unsigned>(std::min<int64_t>(items, at.device.sm_count()))),
                   Shape::kThreads, Shape::kSharedBytes, at, op);
}

}  // namespace

void launch_prefill_attention(const PagedAttention& op, const Launch& at) {
  if (op.cache.type == DType::kF8E4M3) {
    op.cache.head_dim == 64 ? launch_as<64, true>(op, at) : launch_as<128, true>(op, at);
  } else {
    op.cache.head_dim == 64 ? launch_as<64, false>(op, at) : launch_as<128, false>(op, at);
  }
}

}  // namespace millrace::cuda
