// A CTA of four warps has 16 or 32 query rows of one KV head: a row is one head of one token, tokens of one
// sequence that follow one another. Positions go in tiles of 64 and splits of 512, cut at absolute multiples:
// of a tile's scores each warp has 16 positions, of P V a quarter of the dimensions. Keys of the next tile
// come while P V is computed, values while the scores are (cp.async, one stage each: 90 KB at 256 dimensions,
// two CTAs to an SM).
//
// Numerics are those of paged_tile.cuh with tiles of 64 and a softmax that a soft cap may precede: queries
// times scale and probabilities are bf16, sums float32, splits are combined in order, the sink last. A tile
// that a row does not see changes nothing, so a row's bits depend on its position, what it sees and the cache
// alone.
//
// Roofline: the bytes of keys and values / 4.3 TB/s for single rows, which a CTA's latency (some microseconds
// a split) keeps far from it; prompts read them from L2 once for 32 rows.
#include "kernels/cuda/attention/tile_attention.h"

#include "kernels/cuda/attention/paged_tile.cuh"
#include "millrace/kernels/tile/ptx/async_copy.cuh"
#include "millrace/kernels/tile/ptx/mma.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarpLanes;
constexpr int kProductRows = 16;              // of a product; a CTA has kProducts of them
constexpr int kKeys = kWarps * kBlockTokens;  // positions of a tile
constexpr int kTilesOfSplit = kSplitKeys / kKeys;

// Rows of shared memory are longer by 16 bytes, so that eight of them begin in different banks.
template <int kDim, int kProducts>
struct TileShared {
  static constexpr int kQueryRows = kProducts * kProductRows;
  __nv_bfloat16 query[kQueryRows][kDim + 8];
  __nv_bfloat16 keys[kKeys][kDim + 8], values[kKeys][kDim + 8];
  __nv_bfloat16 probs[kQueryRows][kKeys + 8];
  float row_max[kQueryRows][kWarps], row_sum[kQueryRows][kWarps];  // of each warp's positions
};

__device__ inline KeyRange seen_by(const TileAttention& p, int64_t row) {
  const int32_t position = p.cache.positions[row], window = p.op.window, chunk = p.limits.chunk;
  const int32_t first = window > 0 ? max(position - window + 1, 0) : chunk > 0 ? position / chunk * chunk : 0;
  if (p.limits.lengths == nullptr) return {first, position};
  const int32_t last = p.limits.lengths[p.cache.sequence_of[row]] - 1;
  return {first, window > 0 && !p.limits.both_ways ? min(last, position + window - 1) : last};
}

// Tokens of one sequence, and one KV head.
struct TileItem {
  int64_t first_row;
  int32_t tokens;
  int kv_head;
  KeyRange seen;  // by any of them
  const int32_t* table;
};

template <int kDim, int kProducts>
class TileCta {
  using Shared = TileShared<kDim, kProducts>;
  static constexpr int kColumns = kDim / kWarps / 8;  // of eight dimensions, of a warp's P V
  static constexpr int kRows = 2 * kProducts;         // of a lane: g and g + 8 of each product
  using Scores = float[kProducts][2][4];              // of 16 positions
  using Values = float[kProducts][kColumns][4];

 public:
  __device__ TileCta(const TileAttention& p, Shared& shared)
      : p_(p),
        shared_(shared),
        warp_(static_cast<int>(threadIdx.x) / kWarpLanes),
        g_(static_cast<int>(threadIdx.x) % kWarpLanes / 4),
        t_(static_cast<int>(threadIdx.x) % 4),
        group_(p.cache.heads / p.cache.kv_heads) {}

  // split: of those that the item sees, or -1: all, one after the other.
  __device__ void run(const TileItem& item, int32_t split) {
    int32_t tile = item.seen.first / kKeys, last_tile = item.seen.last / kKeys;
    if (split >= 0) {
      const int32_t absolute = item.seen.first_split() + split;
      tile = max(tile, absolute * kTilesOfSplit);
      last_tile = min(last_tile, (absolute + 1) * kTilesOfSplit - 1);
      if (tile > last_tile) return;  // the row has no such split: the whole CTA alike
    }
    begin(item);
    find_pages(item, tile);
    load<false>(item, tile);
    for (; tile <= last_tile; ++tile) {
      load<true>(item, tile);
      ptx::async_wait<1>();
      __syncthreads();  // everybody's part of the keys is there, and the queries
      Scores score = {};
      multiply_qk(score);
      mask(tile, score);
      warp_max(score);
      __syncthreads();  // every warp's row_max is there, and nobody reads the keys any more
      if (tile < last_tile) {
        find_pages(item, tile + 1);
        load<false>(item, tile + 1);
      } else {
        ptx::async_commit();  // an empty group: the count of those under way stays the same
      }
      float alpha[kRows];
      softmax(score, alpha);
      ptx::async_wait<1>();
      __syncthreads();  // probabilities, their sums and everybody's part of the values are there
      multiply_pv(alpha);
      __syncthreads();  // nobody reads values, probabilities and sums any more
      if (split < 0 && (tile == last_tile || (tile + 1) % kTilesOfSplit == 0)) end_split();
    }
    if (split < 0) {
      store_out(item);
    } else {
      store_partial(item, split);
    }
  }

 private:
  __device__ int row_of(int r) const { return g_ + 8 * r; }
  __device__ bool is_row(const TileItem& item, int row) const { return row < item.tokens * group_; }
  __device__ int64_t head_of(const TileItem& item, int row) const {  // among all rows' heads
    return (item.first_row + row / group_) * p_.cache.heads + item.kv_head * group_ + row % group_;
  }

  __device__ void begin(const TileItem& item) {
    for (int i = threadIdx.x; i < Shared::kQueryRows * kDim; i += kThreads) {
      const int row = i / kDim, d = i % kDim;
      const float q = is_row(item, row) ? p_.query[head_of(item, row) * kDim + d] * p_.op.scale : 0.0f;
      shared_.query[row][d] = __float2bfloat16_rn(q);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = row_of(r);
      seen_[r] = is_row(item, row) ? seen_by(p_, item.first_row + row / group_) : KeyRange{1, 0};
      combined_[r] = SplitCombine{};
    }
    clear(out_);
    begin_split();
  }
  __device__ void begin_split() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) row_max_[r] = -INFINITY, row_sum_[r] = 0.0f;
    clear(acc_);
  }
  __device__ static void clear(Values& values) {
#pragma unroll
    for (int i = 0; i < kProducts * kColumns; ++i) {
      float* v = values[i / kColumns][i % kColumns];
      v[0] = v[1] = v[2] = v[3] = 0.0f;
    }
  }

  // The pool's blocks of a tile's pages; kNoBlock for one that no row sees.
  __device__ void find_pages(const TileItem& item, int32_t tile) {
#pragma unroll
    for (int page = 0; page < kWarps; ++page) {
      const int32_t at = tile * kWarps + page;
      const bool seen = at >= item.seen.first / kBlockTokens && at <= item.seen.last / kBlockTokens;
      pages_[page] = seen ? item.table[at] : kNoBlock;
    }
  }
  // A tile of keys or values of these pages, a group of this thread's copies. What no row sees is zeros: it
  // may be anything. A thread has the same 16 bytes of every kStep-th position, so that all but a page's
  // address is known when this is compiled.
  template <bool kValues>
  __device__ void load(const TileItem& item, int32_t tile) {
    constexpr int kChunks = kDim / 8, kStep = kThreads / kChunks;
    static_assert(kBlockTokens % kStep == 0);
    const int key = static_cast<int>(threadIdx.x) / kChunks, d = static_cast<int>(threadIdx.x) % kChunks * 8;
    __nv_bfloat16* to = kValues ? &shared_.values[key][d] : &shared_.keys[key][d];
    const int32_t left = item.seen.last - tile * kKeys - key;  // positions to the last that is seen
    const bool swizzled = p_.cache.order == CacheOrder::kSwizzled;
#pragma unroll
    for (int j = 0; j < kKeys; j += kStep, to += kStep * (kDim + 8)) {
      const int32_t block = pages_[j / kBlockTokens];
      if (block == kNoBlock || j > left) {
        *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
        continue;
      }
      const __nv_bfloat16* from = keys_of_block<__nv_bfloat16>(p_.cache, block, item.kv_head) +
                                  (kValues ? value_distance(p_.cache) : 0);
      const int in_block = key + j % kBlockTokens;
      ptx::async_copy16(to, from + (swizzled ? swizzled_offset(in_block, d) : in_block * kDim + d));
    }
    ptx::async_commit();
  }

  // An operand of 16 rows x 16 columns, of row `first` and column `k` on.
  template <class Rows>
  __device__ void load_a(const Rows& rows, int first, int k, uint32_t (&a)[4]) const {
    const __nv_bfloat16 *upper = rows[first + g_] + k + 2 * t_, *lower = rows[first + g_ + 8] + k + 2 * t_;
    a[0] = word(upper), a[1] = word(lower), a[2] = word(upper + 8), a[3] = word(lower + 8);
  }
  __device__ static uint32_t word(const __nv_bfloat16* pair) {
    return *reinterpret_cast<const uint32_t*>(pair);
  }

  // This warp's 16 positions, columns 2t, 2t + 1 of each eight.
  __device__ void multiply_qk(Scores& score) const {
#pragma unroll 4
    for (int k = 0; k < kDim; k += 16) {
      uint32_t a[kProducts][4];
#pragma unroll
      for (int m = 0; m < kProducts; ++m) load_a(shared_.query, m * kProductRows, k, a[m]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const __nv_bfloat16* key = shared_.keys[warp_ * kBlockTokens + 8 * n + g_] + k + 2 * t_;
        const uint32_t b0 = word(key), b1 = word(key + 8);
#pragma unroll
        for (int m = 0; m < kProducts; ++m) ptx::mma_bf16(score[m][n], a[m], b0, b1);
      }
    }
  }

  // The soft cap, in units of log2 e from here on; what a row does not see.
  __device__ void mask(int32_t tile, Scores& score) const {
    const float cap = p_.limits.softcap;
#pragma unroll
    for (int i = 0; i < kProducts * 8; ++i) {
      const int m = i / 8, n = i / 4 % 2, r = 2 * m + i % 4 / 2;
      float& s = score[m][n][i % 4];
      const int32_t position = tile * kKeys + warp_ * kBlockTokens + 8 * n + 2 * t_ + i % 2;
      const bool sees = position >= seen_[r].first && position <= seen_[r].last;
      const float capped = cap > 0.0f ? cap * tanhf(s / cap) : s;
      s = sees ? capped * kLog2e : -INFINITY;
    }
  }
  __device__ void warp_max(const Scores& score) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float *low = score[r / 2][0] + r % 2 * 2, *high = score[r / 2][1] + r % 2 * 2;
      const float mine = quad_max(fmaxf(fmaxf(low[0], low[1]), fmaxf(high[0], high[1])));
      if (t_ == 0) shared_.row_max[row_of(r)][warp_] = mine;
    }
  }

  // Scores become probabilities in shared memory; alpha: by what accumulators and row_sum are rescaled.
  __device__ void softmax(const Scores& score, float (&alpha)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto all = *reinterpret_cast<const float4*>(shared_.row_max[row_of(r)]);
      const float new_max = fmaxf(row_max_[r], fmaxf(fmaxf(all.x, all.y), fmaxf(all.z, all.w)));
      const float base = softmax_base(new_max);
      alpha[r] = ptx::exp2_approx(row_max_[r] - base);
      row_max_[r] = new_max;
      float prob[2][2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) prob[n][i] = ptx::exp2_approx(score[r / 2][n][r % 2 * 2 + i] - base);
        *reinterpret_cast<uint32_t*>(&shared_.probs[row_of(r)][warp_ * kBlockTokens + 8 * n + 2 * t_]) =
            pack_bf16(prob[n][0], prob[n][1]);
      }
      const float sum = quad_sum((prob[0][0] + prob[0][1]) + (prob[1][0] + prob[1][1]));
      if (t_ == 0) shared_.row_sum[row_of(r)][warp_] = sum;
    }
  }

  // acc = alpha acc + P V, for this warp's dimensions.
  __device__ void multiply_pv(const float (&alpha)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto sums = *reinterpret_cast<const float4*>(shared_.row_sum[row_of(r)]);
      row_sum_[r] = fmaf(row_sum_[r], alpha[r], (sums.x + sums.y) + (sums.z + sums.w));
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        acc_[r / 2][n][r % 2 * 2] *= alpha[r], acc_[r / 2][n][r % 2 * 2 + 1] *= alpha[r];
      }
    }
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
#pragma unroll
    for (int k = 0; k < kKeys; k += 16) {
      uint32_t a[kProducts][4];
#pragma unroll
      for (int m = 0; m < kProducts; ++m) load_a(shared_.probs, m * kProductRows, k, a[m]);
#pragma unroll
      for (int n = 0; n < kColumns;
           n += 2) {  // positions k and k + 8 of eight dimensions, then of the next eight
        const uint4 v = ptx::ldmatrix_x4_transposed(
            &shared_.values[k + lane % 16][warp_ * (kDim / kWarps) + 8 * n + lane / 16 * 8]);
#pragma unroll
        for (int m = 0; m < kProducts; ++m) {
          ptx::mma_bf16(acc_[m][n], a[m], v.x, v.y);
          ptx::mma_bf16(acc_[m][n + 1], a[m], v.z, v.w);
        }
      }
    }
  }

  __device__ void end_split() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const SplitCombine::Factors factors = combined_[r].add(row_max_[r], row_sum_[r]);
#pragma unroll
      for (int i = 0; i < 2 * kColumns; ++i) {
        const int at = r % 2 * 2 + i % 2;
        out_[r / 2][i / 2][at] = factors.combine(out_[r / 2][i / 2][at], acc_[r / 2][i / 2][at]);
      }
    }
    begin_split();
  }

  // store(row, its head among all, first dimension, value of two) for what this thread has of `values`.
  template <class Store>
  __device__ void each_pair(const TileItem& item, const Values& values, Store&& store) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!is_row(item, row_of(r))) continue;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        store(r, head_of(item, row_of(r)), warp_ * (kDim / kWarps) + 8 * n + 2 * t_,
              float2{values[r / 2][n][r % 2 * 2], values[r / 2][n][r % 2 * 2 + 1]});
      }
    }
  }
  __device__ void store_out(const TileItem& item) {
    float by[kRows], sum[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      by[r] = 1.0f;
      if (p_.op.sinks != nullptr && is_row(item, row_of(r))) {
        const int head = item.kv_head * group_ + row_of(r) % group_;
        by[r] = combined_[r].add(p_.op.sinks[head] * kLog2e, 1.0f).mine;
      }
      sum[r] = combined_[r].row_sum;
    }
    each_pair(item, out_, [&](int r, int64_t head, int d, float2 v) {
      *reinterpret_cast<float2*>(p_.out + head * kDim + d) = {v.x * by[r] / sum[r], v.y * by[r] / sum[r]};
    });
  }
  // [rows, heads][max_splits] of [kDim] accumulators, row_max, row_sum.
  __device__ void store_partial(const TileItem& item, int32_t split) const {
    each_pair(item, acc_, [&](int r, int64_t head, int d, float2 v) {
      float* to = p_.partial + (head * p_.max_splits + split) * (kDim + 2);
      *reinterpret_cast<float2*>(to + d) = v;
      if (warp_ == 0 && d == 0) to[kDim] = row_max_[r], to[kDim + 1] = row_sum_[r];
    });
  }

  const TileAttention& p_;
  Shared& shared_;
  const int warp_, g_, t_, group_;
  int32_t pages_[kWarps];  // of the keys that were loaded last, whose values come next
  KeyRange seen_[kRows];
  SplitCombine combined_[kRows];
  float row_max_[kRows], row_sum_[kRows];
  Values acc_, out_;
};

// grid: blocks of `tokens` rows, KV heads, splits of a row (with partial).
template <int kDim, int kProducts>
__global__ void __launch_bounds__(kThreads)
    tile_attention_kernel(const __grid_constant__ TileAttention p, int tokens) {
  extern __shared__ __align__(16) uint8_t memory[];
  TileCta<kDim, kProducts> cta(p, *reinterpret_cast<TileShared<kDim, kProducts>*>(memory));
  const int32_t split = p.partial != nullptr ? static_cast<int32_t>(blockIdx.z) : -1;
  const int32_t begin = static_cast<int32_t>(blockIdx.x) * tokens, end = min(begin + tokens, p.rows);
  for (int32_t row = begin; row < end;) {  // runs of one sequence
    int32_t count = 1;                     // of single rows no sequence is read
    while (row + count < end && p.cache.sequence_of[row + count] == p.cache.sequence_of[row]) ++count;
    const KeyRange seen{seen_by(p, row).first, seen_by(p, row + count - 1).last};
    const int kv_head = static_cast<int>(blockIdx.y);
    cta.run({row, count, kv_head, seen, table_of_row(p.cache, row, kv_head)}, split);
    __syncthreads();  // nobody loads the next run's queries before all are done with these
    row += count;
  }
}

// The splits of one row and head, in order. A thread per dimension.
template <int kDim>
__global__ void __launch_bounds__(kDim) combine_tile_splits_kernel(const __grid_constant__ TileAttention p) {
  const int64_t row = blockIdx.x, at = row * p.cache.heads + blockIdx.y;
  const int d = threadIdx.x;
  const int32_t splits = seen_by(p, row).splits();
  const float* from = p.partial + at * p.max_splits * (kDim + 2);
  SplitCombine combined;
  float out = 0.0f;
  for (int32_t split = 0; split < splits; ++split, from += kDim + 2) {
    out = combined.add(from[kDim], from[kDim + 1]).combine(out, from[d]);
  }
  float by = 1.0f;
  if (p.op.sinks != nullptr) by = combined.add(p.op.sinks[blockIdx.y] * kLog2e, 1.0f).mine;
  p.out[at * kDim + d] = out * by / combined.row_sum;
}

template <int kDim, int kProducts>
void launch_tiles(const TileAttention& op, int32_t tokens, const Launch& at) {
  constexpr size_t kBytes = sizeof(TileShared<kDim, kProducts>);
  static_assert(kBytes <= 100 * 1024);
  const dim3 grid(static_cast<unsigned>((op.rows + tokens - 1) / tokens),
                  static_cast<unsigned>(op.cache.kv_heads),
                  static_cast<unsigned>(op.partial != nullptr ? op.max_splits : 1));
  allow_shared_memory(tile_attention_kernel<kDim, kProducts>, kBytes);
  tile_attention_kernel<kDim, kProducts><<<grid, kThreads, kBytes, at.stream>>>(op, tokens);
  check_launch("tile_attention_kernel");
}

// Every instantiation: single rows have one product.
template <int kDim>
void launch_as(const TileAttention& op, const Launch& at) {
  const int32_t group = op.cache.heads / op.cache.kv_heads;
  if (op.single_tokens) {
    launch_tiles<kDim, 1>(op, 1, at);
  } else {
    launch_tiles<kDim, 2>(op, 2 * kProductRows / group, at);
  }
  if (op.partial == nullptr) return;
  combine_tile_splits_kernel<kDim>
      <<<dim3(static_cast<unsigned>(op.rows), static_cast<unsigned>(op.cache.heads)), kDim, 0, at.stream>>>(
          op);
  check_launch("combine_tile_splits_kernel");
}

}  // namespace

bool supports_tile_attention(DType kv_type, int32_t heads, int32_t kv_heads, int32_t head_dim,
                             const Device& device) {
  return kv_type == DType::kBF16 && (head_dim == 64 || head_dim == 128 || head_dim == 256) && kv_heads > 0 &&
         heads % kv_heads == 0 && heads / kv_heads <= kProductRows && device.has_bulk_copies();
}

size_t tile_attention_partial_bytes(int64_t rows, int32_t heads, int32_t max_splits, int32_t head_dim) {
  return static_cast<size_t>(rows) * static_cast<size_t>(heads) * static_cast<size_t>(max_splits) *
         static_cast<size_t>(head_dim + 2) * sizeof(float);
}

void launch_tile_attention(const TileAttention& op, const Launch& at) {
  if (op.rows == 0) return;
  if (op.cache.head_dim == 64) return launch_as<64>(op, at);
  if (op.cache.head_dim == 128) return launch_as<128>(op, at);
  launch_as<256>(op, at);
}

}  // namespace millrace::cuda
