// Latent attention on Hopper's warpgroup products, for single rows and for prompts: heads of 64 + 512 or 64 +
// 256 dimensions, caches of bf16 and fp8.
//
// A CTA has 64 rows of the product: a row is one head of one token, tokens of one sequence that follow one
// another, so that all of them share the tile of 64 keys that is in shared memory. A producer warp loads
// tiles by bulk copies; the cache is kept in the order in which the tensor cores take it, once K-major as
// keys, and its last `rank` dimensions once MN-major as values: the values are never copied. Of a tile's
// scores each of two consumer warpgroups has 32 keys, and of P V half of the dimensions: row maxima and
// probabilities pass through shared memory. Of an fp8 cache codes come into a ring of their own, and the
// consumers convert a tile to bf16, exactly.
//
// Numerics: queries, times scale and log2 e, are rounded to bf16, probabilities too; sums are float32.
// Positions are cut at absolute multiples into tiles of 64 and splits of 512; within a split an online
// softmax goes from tile to tile, splits are combined in order. A tile or split that a row does not see
// changes nothing, so a row's bits depend on its position and the cache alone. Splits in turn add up in
// `out`, in L2: 128 KB each way beside eight tiles; on CTAs of their own they lie in `partial`.
//
// Roofline: 2 x 64 x 64 x (64 + 2 rank) operations a tile, 2,200 cycles of the tensor cores at rank 512,
// beside 72 KB of keys: 4,000 cycles of an SM's share of 4.3 TB/s where every row has its own context, from
// L2 in prompts.
#include "kernels/cuda/attention/latent_tile.cuh"

namespace millrace::cuda {
namespace {

using namespace latent;

#ifdef MILLRACE_HAS_WGMMA

template <int kRank, bool kFp8>
struct Ring {
  using S = Shape<kRank, kFp8>;
  uint8_t* shared;
  __device__ uint8_t* stage(uint32_t n) const {
    return shared + S::kStagesAt + n % S::kStages * S::kStageBytes;
  }
  __device__ uint64_t* full(uint32_t n) const {
    return reinterpret_cast<uint64_t*>(shared + S::kBarriersAt) + n % S::kStages;
  }
  __device__ uint64_t* empty(uint32_t n) const { return full(n) + S::kStages; }
  __device__ void init() const {
    for (uint32_t n = 0; n < S::kStages; ++n) {
      ptx::barrier_init(full(n), 1);
      ptx::barrier_init(empty(n), kConsumerWarps);
    }
    ptx::barrier_init_fence();
  }
  __device__ void wait_full(uint32_t n) const { ptx::barrier_wait(full(n), n / S::kStages & 1); }
  __device__ void wait_empty(uint32_t n) const {
    if (n >= S::kStages) ptx::barrier_wait(empty(n), (n / S::kStages - 1) & 1);
  }
  __device__ void release(uint32_t n) const {  // by every consumer warp
    __syncwarp();
    if (threadIdx.x % kWarpLanes == 0) ptx::barrier_arrive(empty(n));
  }
};

// The producer warp. Positions from the last row's on are not read; of bf16 they are zeros, since a
// probability of zero does not undo a NaN.
template <int kRank, bool kFp8>
__device__ void produce(const LatentAttention& p, const Item& item, const Ring<kRank, kFp8>& ring) {
  using S = Shape<kRank, kFp8>;
  const int lane = threadIdx.x % kWarpLanes;
  const int32_t past = item.last() + 1;
  uint32_t n = 0;
  for (int32_t tile = item.first_tile; tile < item.past_tile; ++tile, ++n) {
    ring.wait_empty(n);
    uint8_t* stage = ring.stage(n);
    const auto rows_of = [&](int page) {  // that there are
      return min(max(past - tile * kKeys - page * kBlockTokens, 0), kBlockTokens);
    };
    if constexpr (kFp8) {
      const int pages = (min(past - tile * kKeys, kKeys) + kBlockTokens - 1) / kBlockTokens;
      if (lane == 0)
        ptx::barrier_arrive_expect(ring.full(n), static_cast<uint32_t>(pages * S::kRawPageBytes));
      __syncwarp();
      if (lane < pages) {
        const LatentBlock<Fp8Code, false> block(p.cache, item.table[tile * kPages + lane]);
        ptx::bulk_copy_kept(stage + lane * S::kRawPageBytes, block.scales, S::kRawPageBytes, ring.full(n));
      }
    } else {
      const int rows = min(past - tile * kKeys, kKeys);
      if (rows < kKeys) {
        for (int part = 0; part < S::kParts; ++part) {
          for (int at = rows * ptx::kSwizzleRowBytes + 16 * lane; at < kPartBytes; at += 16 * kWarpLanes) {
            *reinterpret_cast<uint4*>(stage + part * kPartBytes + at) = uint4{0, 0, 0, 0};
          }
        }
        ptx::publish_to_async();
        __syncwarp();  // all zeros are there before the first lane says so
      }
      if (lane == 0) {
        ptx::barrier_arrive_expect(ring.full(n),
                                   static_cast<uint32_t>(rows * ptx::kSwizzleRowBytes * S::kParts));
      }
      __syncwarp();
      for (int i = lane; i < kPages * S::kParts; i += kWarpLanes) {
        const int page = i % kPages, part = i / kPages, here = rows_of(page);
        if (here == 0) continue;
        const auto* keys = keys_of_block<__nv_bfloat16>(p.cache, item.table[tile * kPages + page], 0);
        ptx::bulk_copy_kept(stage + part * kPartBytes + page * kPagePartBytes,
                            keys + part * (kPagePartBytes / 2),
                            static_cast<uint32_t>(here * ptx::kSwizzleRowBytes), ring.full(n));
      }
    }
  }
}

// Lane (g, t) of warp w of either warpgroup has rows 16w + g and 16w + g + 8, of its 32 keys' scores columns
// 8j + 2t and + 1.
template <int kRank, bool kFp8>
class Consumer {
  using S = Shape<kRank, kFp8>;
  static constexpr int kPieces = kRank / kGroups / 128;  // of 128 dimensions, of a warpgroup's P V

 public:
  __device__ Consumer(const LatentAttention& p, const Item& item, uint8_t* shared)
      : p_(p),
        item_(item),
        shared_(shared),
        ring_{shared},
        group_(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / ptx::kWarpgroupThreads), 0)),
        row_(static_cast<int>(threadIdx.x) % ptx::kWarpgroupThreads / kWarpLanes * 16 +
             static_cast<int>(threadIdx.x) % kWarpLanes / 4),
        t_(static_cast<int>(threadIdx.x) % 4) {}

  __device__ void run(int32_t split) {
    store_queries();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = (row_ + 8 * r) / item_.heads;
      last_[r] = token < item_.tokens ? item_.position + token : -1;
    }
    begin_split();
    uint32_t n = 0;
    for (int32_t tile = item_.first_tile; tile < item_.past_tile; ++tile, ++n) {
      const uint8_t* keys = wait_keys(tile, n);
      float score[16];
      multiply_qk(keys, score);
      softmax(tile, score);
      multiply_pv(keys);
      if constexpr (!kFp8) ring_.release(n);
      const bool ends = tile + 1 == item_.past_tile || (tile + 1) % kTilesOfSplit == 0;
      if (!ends) continue;
      add_row_sums();
      if (split >= 0) {
        store_partial(split);
      } else {
        end_split(tile / kTilesOfSplit == 0, tile + 1 == item_.past_tile);
        begin_split();
      }
    }
  }

 private:
  __device__ static void sync() { ptx::named_barrier<1, kConsumers>(); }
  __device__ float* rows(int group) const {
    return reinterpret_cast<float*>(shared_ + S::kRowsAt) + group * kLatentRows;
  }
  __device__ __nv_bfloat16* probs(int row) const {
    return reinterpret_cast<__nv_bfloat16*>(shared_ + S::kProbsAt) + row * kProbStride;
  }
  __device__ bool is_row(int row) const {
    return row / item_.heads < item_.tokens && item_.first_head + row % item_.heads < p_.cache.heads;
  }
  __device__ int64_t head_of(int row) const {  // among all rows' heads
    return int64_t{item_.first_row + row / item_.heads} * p_.cache.heads + item_.first_head +
           row % item_.heads;
  }

  // Eight dimensions of 64 rows by all threads: load(row or key, chunk) of several at once, then store of
  // each to the swizzled operand at `to`. Loads that follow one another would wait for one another.
  template <class Load, class Convert>
  __device__ __forceinline__ static void fill_operand(uint8_t* to, Load&& load, Convert&& convert) {
    constexpr int kChunks = S::kDim / 8, kLoads = kLatentRows * kChunks / kConsumers;
    constexpr int kAtOnce = kLoads % 6 == 0 ? 6 : 5;
    static_assert(kLatentRows * kChunks % kConsumers == 0 && kLoads % kAtOnce == 0);
#pragma unroll 1
    for (int first = 0; first < kLoads; first += kAtOnce) {
      decltype(load(0, 0)) raw[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = (first + i) * kConsumers + static_cast<int>(threadIdx.x);
        raw[i] = load(at / kChunks, at % kChunks);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = (first + i) * kConsumers + static_cast<int>(threadIdx.x);
        const int row = at / kChunks, chunk = at % kChunks;
        *reinterpret_cast<uint4*>(to + chunk / 8 * kPartBytes +
                                  ptx::swizzled(static_cast<uint32_t>(row),
                                                static_cast<uint32_t>(chunk % 8 * 16))) = convert(raw[i]);
      }
    }
  }
  // Times scale and log2 e, rounded; rows that are none are zeros.
  __device__ void store_queries() const {
    struct Eight {
      float4 a, b;
    };
    const float scale = p_.scale * kLog2e;
    fill_operand(
        shared_ + S::kQueriesAt,
        [&](int row, int chunk) {
          if (!is_row(row)) return Eight{};
          const auto* x = reinterpret_cast<const float4*>(p_.query + head_of(row) * S::kDim + chunk * 8);
          return Eight{x[0], x[1]};
        },
        [&](const Eight& x) {
          return uint4{pack_bf16(x.a.x * scale, x.a.y * scale), pack_bf16(x.a.z * scale, x.a.w * scale),
                       pack_bf16(x.b.x * scale, x.b.y * scale), pack_bf16(x.b.z * scale, x.b.w * scale)};
        });
    ptx::publish_to_async();
    sync();  // all rows are there
  }

  // The tile's keys as bf16.
  __device__ const uint8_t* wait_keys(int32_t tile, uint32_t n) const {
    if constexpr (!kFp8) {
      ring_.wait_full(n);
      return ring_.stage(n);
    } else {
      sync();  // both warpgroups' products with the tile before are done
      ring_.wait_full(n);
      convert(tile, ring_.stage(n));
      ring_.release(n);
      ptx::publish_to_async();
      sync();  // all of the tile is there
      return shared_ + S::kTileAt;
    }
  }
  // Positions that no row sees may be anything: zeros.
  __device__ __forceinline__ void convert(int32_t tile, const uint8_t* raw) const {
    struct Codes {
      uint2 eight;
      uint32_t by;
    };
    const int count = item_.last() + 1 - tile * kKeys;
    fill_operand(
        shared_ + S::kTileAt,
        [&](int key, int chunk) {
          if (key >= count) return Codes{};
          const uint8_t* page = raw + key / kBlockTokens * S::kRawPageBytes;
          const int in_page = key % kBlockTokens;
          return Codes{
              *reinterpret_cast<const uint2*>(page + kLatentScaleBytes + in_page * S::kDim + chunk * 8),
              page[in_page]};
        },
        [](const Codes& codes) {
          const uint32_t by = fp8_factor(codes.by) * 0x10001u;
          return uint4{codes_to_bf16<kCodes01>(codes.eight.x, by), codes_to_bf16<kCodes23>(codes.eight.x, by),
                       codes_to_bf16<kCodes01>(codes.eight.y, by),
                       codes_to_bf16<kCodes23>(codes.eight.y, by)};
        });
  }

  __device__ __forceinline__ void multiply_qk(const uint8_t* keys, float (&score)[16]) const {
    const uint64_t a = ptx::wgmma_operand(shared_ + S::kQueriesAt),
                   b = ptx::wgmma_operand(keys + group_ * (kPartBytes / kGroups));
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < S::kDim / 16; ++s) {
      const int at = s / 4 * (kPartBytes / 16) + s % 4 * 2;
      ptx::wgmma_bf16(score, a + at, b + at, s > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::fence_registers(score);
  }

  // Scores become probabilities in shared memory; accumulators and row_sum are rescaled.
  __device__ __forceinline__ void softmax(int32_t tile, float (&score)[16]) {
    const int32_t from = tile * kKeys + group_ * (kKeys / kGroups) + 2 * t_;
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int r = i / 2 % 2;
      score[i] = from + i / 4 * 8 + i % 2 <= last_[r] ? score[i] : -INFINITY;
      largest[r] = fmaxf(largest[r], score[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = quad_max(largest[r]);
      if (t_ == 0) rows(group_)[row_ + 8 * r] = largest[r];
    }
    sync();  // both warpgroups' maxima are there, and nobody reads the probabilities before
    float alpha[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float new_max = fmaxf(row_max_[r], fmaxf(rows(0)[row_ + 8 * r], rows(1)[row_ + 8 * r])),
                  base = softmax_base(new_max);
      alpha[r] = ptx::exp2_approx(row_max_[r] - base);
      row_max_[r] = new_max;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float low = ptx::exp2_approx(score[4 * j + 2 * r] - base),
                    high = ptx::exp2_approx(score[4 * j + 2 * r + 1] - base);
        sum += low + high;
        *reinterpret_cast<uint32_t*>(probs(row_ + 8 * r) + group_ * (kKeys / kGroups) + 8 * j + 2 * t_) =
            pack_bf16(low, high);
      }
      row_sum_[r] = fmaf(row_sum_[r], alpha[r], sum);
    }
#pragma unroll
    for (int i = 0; i < kPieces * 64; ++i) acc_[i / 64][i % 64] *= alpha[i / 2 % 2];
    sync();  // all probabilities are there, and nobody reads the maxima any more
  }

  // acc += P V of this warpgroup's dimensions.
  __device__ __forceinline__ void multiply_pv(const uint8_t* keys) {
    uint32_t prob[kPages][4];
#pragma unroll
    for (int page = 0; page < kPages; ++page) {
      const __nv_bfloat16 *upper = probs(row_) + page * 16 + 2 * t_,
                          *lower = probs(row_ + 8) + page * 16 + 2 * t_;
      prob[page][0] = *reinterpret_cast<const uint32_t*>(upper);
      prob[page][1] = *reinterpret_cast<const uint32_t*>(lower);
      prob[page][2] = *reinterpret_cast<const uint32_t*>(upper + 8);
      prob[page][3] = *reinterpret_cast<const uint32_t*>(lower + 8);
    }
    const uint8_t* values = keys + (1 + group_ * 2 * kPieces) * kPartBytes;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) ptx::fence_registers(acc_[piece]);
    ptx::fence_registers(prob);
    ptx::wgmma_fence();
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint64_t b = ptx::wgmma_transposed_operand(values + piece * 2 * kPartBytes, kPartBytes);
#pragma unroll
      for (int page = 0; page < kPages; ++page) {
        ptx::wgmma_bf16_transposed(acc_[piece], prob[page], b + page * (kPagePartBytes / 16));
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) ptx::fence_registers(acc_[piece]);
    ptx::fence_registers(prob);
  }

  __device__ void begin_split() {
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max_[r] = -INFINITY, row_sum_[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces * 64; ++i) acc_[i / 64][i % 64] = 0.0f;
  }
  // From this lane's part of a row's sum to all of it.
  __device__ void add_row_sums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum_[r] = quad_sum(row_sum_[r]);
      if (t_ == 0) rows(group_)[row_ + 8 * r] = row_sum_[r];
    }
    sync();  // both warpgroups' sums are there
#pragma unroll
    for (int r = 0; r < 2; ++r) row_sum_[r] = rows(0)[row_ + 8 * r] + rows(1)[row_ + 8 * r];
    sync();  // nobody writes maxima over them
  }

  // store(i, dimension, accumulators of it and the next) for pairs first .. first + kCount - 1 of what this
  // thread has.
  template <int kCount, class Store>
  __device__ __forceinline__ void each_pair(int r, int first, Store&& store) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float* v = acc_[(first + i) / 16] + (first + i) % 16 * 4 + 2 * r;
      store(i, group_ * (kRank / kGroups) + (first + i) * 8 + 2 * t_, v[0], v[1]);
    }
  }
  // The split is combined with those before it, in `out`: read several at once, since a read waits for the
  // writes before it.
  __device__ void end_split(bool first, bool last) {
    constexpr int kAtOnce = 16;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const SplitCombine::Factors factors = combined_[r].add(row_max_[r], row_sum_[r]);
      if (!is_row(row_ + 8 * r)) continue;
      float* out = p_.out + head_of(row_ + 8 * r) * S::kDim + kRope;
      const float all = combined_[r].row_sum;
#pragma unroll
      for (int at = 0; at < kPieces * 16; at += kAtOnce) {
        float2 before[kAtOnce] = {};
        if (!first) {
          each_pair<kAtOnce>(r, at, [&](int i, int d, float, float) {
            before[i] = *reinterpret_cast<const float2*>(out + d);
          });
        }
        each_pair<kAtOnce>(r, at, [&](int i, int d, float a, float b) {
          float2 v{factors.combine(before[i].x, a), factors.combine(before[i].y, b)};
          if (last) v = {v.x / all, v.y / all};
          *reinterpret_cast<float2*>(out + d) = v;
        });
      }
    }
  }
  // [rows, heads][max_splits] of [rank] accumulators, row_max, row_sum.
  __device__ void store_partial(int32_t split) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!is_row(row_ + 8 * r)) continue;
      float* to = p_.partial + (head_of(row_ + 8 * r) * p_.max_splits + split) * (kRank + 2);
      each_pair<kPieces * 16>(r, 0, [&](int, int d, float a, float b) {
        *reinterpret_cast<float2*>(to + d) = {a, b};
      });
      if (group_ == 0 && t_ == 0) to[kRank] = row_max_[r], to[kRank + 1] = row_sum_[r];
    }
  }

  const LatentAttention& p_;
  const Item& item_;
  uint8_t* shared_;
  const Ring<kRank, kFp8> ring_;
  const int group_, row_, t_;
  int32_t last_[2];                // position that a row sees; -1: no row
  float row_max_[2], row_sum_[2];  // of the split; row_sum_ is this lane's part
  SplitCombine combined_[2];       // of the splits before
  float acc_[kPieces][64];
};

#endif  // MILLRACE_HAS_WGMMA

// grid: pieces of sequences x groups of 64 heads; splits of a row (with partial).
template <int kRank, bool kFp8>
__global__ void __launch_bounds__(kThreads, 1)
    latent_wgmma_kernel(const __grid_constant__ LatentAttention p) {
#ifdef MILLRACE_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  const Ring<kRank, kFp8> ring{shared};
  if (threadIdx.x == 0) ring.init();
  ptx::let_dependents_start();
  __syncthreads();  // the barriers are there
  ptx::wait_for_previous();
  const int32_t split = p.partial != nullptr ? static_cast<int32_t>(blockIdx.y) : -1;
  const Item item = item_of(p, split);
  if (item.first_tile >= item.past_tile) return;  // no row has such a split: the whole CTA alike
  if (threadIdx.x < kConsumers) {
    ptx::more_registers<kConsumerRegisters>();
    Consumer<kRank, kFp8>(p, item, shared).run(split);
  } else {
    ptx::fewer_registers<kProducerRegisters>();
    if (threadIdx.x < kConsumers + kWarpLanes) produce<kRank, kFp8>(p, item, ring);
  }
#else
  __trap();
#endif
}

// The splits of one row and head, in order. A thread per dimension.
template <int kRank>
__global__ void __launch_bounds__(kRank)
    combine_latent_splits_kernel(const __grid_constant__ LatentAttention p) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int64_t row = blockIdx.x, at = row * p.cache.heads + blockIdx.y;
  const int d = threadIdx.x;
  const int32_t splits = p.cache.positions[row] / kSplitKeys + 1;
  const float* from = p.partial + at * p.max_splits * (kRank + 2);
  SplitCombine combined;
  float out = 0.0f;
  for (int32_t split = 0; split < splits; ++split, from += kRank + 2) {
    out = combined.add(from[kRank], from[kRank + 1]).combine(out, from[d]);
  }
  p.out[at * (kRope + kRank) + kRope + d] = out / combined.row_sum;
}

template <int kRank, bool kFp8>
void launch_as(const LatentAttention& op, const Launch& at) {
  constexpr size_t kBytes = Shape<kRank, kFp8>::kBytes;
  const int heads = op.cache.heads < kLatentRows ? op.cache.heads : kLatentRows;
  const int64_t pieces =
      int64_t{op.chunks != nullptr ? op.num_chunks : op.rows} * ((op.cache.heads + heads - 1) / heads);
  const dim3 grid(static_cast<unsigned>(pieces),
                  static_cast<unsigned>(op.partial != nullptr ? op.max_splits : 1));
  allow_shared_memory(latent_wgmma_kernel<kRank, kFp8>, kBytes);
  launch_dependent("latent_wgmma_kernel", latent_wgmma_kernel<kRank, kFp8>, grid, kThreads, kBytes, at, op);
  if (op.partial == nullptr) return;
  launch_dependent("combine_latent_splits_kernel", combine_latent_splits_kernel<kRank>,
                   dim3(static_cast<unsigned>(op.rows), static_cast<unsigned>(op.cache.heads)), kRank, 0, at,
                   op);
}

}  // namespace

bool supports_latent_wgmma(DType kv_type, int32_t rope, int32_t rank, const Device& device) {
  return (kv_type == DType::kBF16 || kv_type == DType::kF8E4M3) && rope == kRope &&
         (rank == 512 || rank == 256) && device.has_wgmma();
}

size_t latent_partial_bytes(int64_t rows, int32_t heads, int32_t max_splits, int32_t rank) {
  return static_cast<size_t>(rows) * static_cast<size_t>(heads) * static_cast<size_t>(max_splits) *
         static_cast<size_t>(rank + 2) * sizeof(float);
}

void launch_latent_wgmma(const LatentAttention& op, const Launch& at) {
  if (op.rows == 0) return;
  if (op.cache.type == DType::kF8E4M3) {
    op.rank == 512 ? launch_as<512, true>(op, at) : launch_as<256, true>(op, at);
  } else {
    op.rank == 512 ? launch_as<512, false>(op, at) : launch_as<256, false>(op, at);
  }
}

}  // namespace millrace::cuda
