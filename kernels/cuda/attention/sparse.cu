// The pages of sparse attention (sparse.h): summaries, bounds, choice. What a row chooses depends on its
// query, its position and the keys before it: tiles of pages lie at absolute places, sums have one order.
//
// Roofline: memory, the summaries of all pages before the row's own. Bounds take two multiply-adds for each
// dimension, head and page on the CUDA cores, half the time of the bytes for eight heads of a KV head; the
// choice has one CTA's latency.
#include "kernels/cuda/attention/sparse.h"

#include <algorithm>
#include <cfloat>

#include "base/check.h"
#include "base/sparse_pages.h"
#include "kernels/cuda/attention/kv_cache.cuh"
#include "kernels/cuda/attention/top_select.cuh"
#include "kernels/cuda/device.h"
#include "kernels/cuda/tile/launch.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

namespace millrace::cuda {
namespace {

// ---------------------------------------------------------------- summaries

// The bf16 at or below x, at or above x; a NaN stays one (base/sparse_pages.h).
__device__ inline uint16_t below(float x) {
  const uint32_t u = __float_as_uint(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((u >> 31) != 0 ? (u + 0xffffu) >> 16 : u >> 16);
}
__device__ inline uint16_t above(float x) {
  const uint32_t u = __float_as_uint(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((u >> 31) != 0 ? u >> 16 : (u + 0xffffu) >> 16);
}

// One KV head of a block, by all threads of the CTA.
template <class T, bool kSwizzled>
__device__ void summarize(const LayerCache& cache, const PageSummaries& to, int32_t block, int kv_head) {
  const HeadRows<T, kSwizzled> rows(cache, block, kv_head);
  uint16_t* out = to.data + (static_cast<int64_t>(block) * cache.kv_heads + kv_head) * 2 * to.padded_dim;
  for (int d = threadIdx.x; d < to.padded_dim; d += blockDim.x) {
    float least = 0.0f, largest = 0.0f;
    bool number = true;
    if (d < cache.head_dim) {
      least = INFINITY, largest = -INFINITY;
      for (int t = 0; t < kBlockTokens; ++t) {
        const float key = rows.key(t, d);
        number = number && !isnan(key);
        least = key < least ? key : least;
        largest = key > largest ? key : largest;
      }
    }
    // A page with a NaN has no bounds: it is chosen first, and its NaN is seen.
    out[d] = number ? below(least) : 0x7fc0;
    out[to.padded_dim + d] = number ? above(largest) : 0x7fc0;
  }
}

// launch(T{}, kSwizzled) for the element type and order of a cache.
template <class With>
void with_cache_order(const LayerCache& cache, With&& with) {
  if (cache.order == CacheOrder::kSwizzled) {  // bf16 and fp8
    return cache.type == DType::kBF16 ? with(__nv_bfloat16{}, std::true_type{})
                                      : with(Fp8Code{}, std::true_type{});
  }
  with_cache_type(cache.type, [&](auto element) { with(element, std::false_type{}); });
}

constexpr int kSummaryThreads = 128;

template <class T, bool kSwizzled>
__global__ void __launch_bounds__(kSummaryThreads)
    summarize_rows_kernel(LayerCache cache, PageSummaries to, const int32_t* budgets) {
  const int64_t row = blockIdx.x;
  const int32_t position = cache.positions[row];
  if (budgets[row] == 0 || position % kBlockTokens != kBlockTokens - 1) return;
  summarize<T, kSwizzled>(cache, to, table_of_row(cache, row)[position / kBlockTokens],
                          static_cast<int>(blockIdx.y));
}

template <class T, bool kSwizzled>
__global__ void __launch_bounds__(kSummaryThreads)
    summarize_block_kernel(LayerCache cache, PageSummaries to, int32_t block) {
  summarize<T, kSwizzled>(cache, to, block, static_cast<int>(blockIdx.x));
}

// ---------------------------------------------------------------- bounds

constexpr int kBoundThreads = 256, kBoundWarps = kBoundThreads / kWarpLanes;
constexpr int kWarpPages = kSummaryTile / kBoundWarps;  // of a tile, a warp's

// Sums of kHeads accumulators over the kLanes lanes of a page: halves are exchanged, so that a lane ends with
// one head, number lane / (kLanes / kHeads).
template <int kHeads, int kLanes>
__device__ __forceinline__ float reduce_heads(float (&acc)[kHeads], int lane) {
  int step = kLanes / 2;
#pragma unroll
  for (int half = kHeads / 2; half >= 1; half /= 2, step /= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float send = upper ? acc[i] : acc[i + half], keep = upper ? acc[i + half] : acc[i];
      acc[i] = keep + __shfl_xor_sync(kAllLanes, send, step);
    }
  }
  float sum = acc[0];
  for (; step >= 1; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return sum;
}

// A row's budget is smaller than its context: pages before its own, or 0.
__device__ inline int32_t pages_to_choose_from(const SparseRows& p, int64_t row) {
  const int32_t before = p.cache.positions[row] / kBlockTokens, budget = p.budgets[row];
  return budget > 0 && before + 1 > budget ? before : 0;
}

// A page's bounds lie in kLanes lanes, kVectors times 16 bytes in each; a lane has as much of the queries of
// kHeads heads, what is below zero where it has least keys and what is above where it has the largest. grid:
// tiles, KV heads times passes over kHeads of their query heads, rows.
template <int kLanes, int kVectors, int kHeads>
__global__ void __launch_bounds__(kBoundThreads)
    page_bounds_kernel(const __grid_constant__ SparseRows p, int32_t passes) {
  static_assert(kHeads <= kLanes && kHeads <= kBoundWarps);
  constexpr int kPages = kWarpLanes / kLanes;  // at once
  constexpr int kAhead = 8 / kVectors > 0 ? 8 / kVectors : 1;
  __shared__ float bounds[kHeads][kSummaryTile];
  __shared__ float4 queries[kHeads * kVectors * 2 * kLanes];
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int64_t row = blockIdx.z;
  const int32_t before = pages_to_choose_from(p, row),
                first = static_cast<int32_t>(blockIdx.x) * kSummaryTile;
  if (first >= before) return;
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int kv_head = static_cast<int>(blockIdx.y) / passes, pass = static_cast<int>(blockIdx.y) % passes;
  const int group = p.cache.heads / p.cache.kv_heads, dim = p.cache.head_dim;
  const int heads = min(kHeads, group - pass * kHeads);
  const int64_t first_head = row * p.cache.heads + kv_head * group + pass * kHeads;
  const int of_least = p.summaries.padded_dim / 8;  // vectors of 8

  // Each part of the queries that some lane has, then to the lanes: no two of a load in one bank.
  constexpr int kFours = kHeads * kVectors * 2 * kLanes;
  for (int at = threadIdx.x; at < kFours; at += kBoundThreads) {
    const int vector = at % kLanes + at / (2 * kLanes) % kVectors * kLanes, g = at / (2 * kLanes * kVectors);
    const bool largest = vector >= of_least;
    const int d = vector % of_least * 8 + at / kLanes % 2 * 4;
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool there = g < heads && d + e < dim && vector < 2 * of_least;
      x[e] = there ? __ldg(p.query + (first_head + g) * dim + d + e) : 0.0f;
      if ((x[e] < 0.0f) == largest) x[e] = 0.0f;  // a NaN is with the largest, and stays one
    }
    queries[at] = {x[0], x[1], x[2], x[3]};
  }
  __syncthreads();  // the queries are there
  float query[kHeads][kVectors][8];
#pragma unroll
  for (int g = 0; g < kHeads; ++g) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 four = queries[((g * kVectors + i) * 2 + half) * kLanes + lane % kLanes];
        query[g][i][4 * half] = four.x, query[g][i][4 * half + 1] = four.y;
        query[g][i][4 * half + 2] = four.z, query[g][i][4 * half + 3] = four.w;
      }
    }
  }
  const int32_t warp_first = first + warp * kWarpPages;
  const int32_t* table = table_of_row(p.cache, row);
  const int32_t block =
      lane < kWarpPages && warp_first + lane < before ? __ldg(table + warp_first + lane) : -1;
  const uint4* summaries = reinterpret_cast<const uint4*>(p.summaries.data);
#pragma unroll 1
  for (int at = 0; at < kWarpPages; at += kAhead * kPages) {
    uint4 words[kAhead][kVectors];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int32_t from = __shfl_sync(kAllLanes, block, (at + j * kPages + lane / kLanes) % kWarpLanes);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int vector = lane % kLanes + i * kLanes;
        words[j][i] = {0, 0, 0, 0};
        if (at + j * kPages < kWarpPages && from >= 0 && vector < 2 * of_least) {
          words[j][i] =
              summaries[(static_cast<int64_t>(from) * p.cache.kv_heads + kv_head) * 2 * of_least + vector];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (at + j * kPages >= kWarpPages) break;
      float acc[kHeads] = {};
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const uint32_t pairs[4] = {words[j][i].x, words[j][i].y, words[j][i].z, words[j][i].w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float key = __uint_as_float(e % 2 == 0 ? pairs[e / 2] << 16 : pairs[e / 2] & 0xffff0000u);
#pragma unroll
          for (int g = 0; g < kHeads; ++g) acc[g] = fmaf(key, query[g][i][e], acc[g]);
        }
      }
      const float bound = reduce_heads<kHeads, kLanes>(acc, lane);
      const int in_page = lane % kLanes;
      if (in_page % (kLanes / kHeads) == 0) {
        bounds[in_page / (kLanes / kHeads)][warp * kWarpPages + at + j * kPages + lane / kLanes] =
            bound * p.scale;
      }
    }
  }
  __syncthreads();  // the bounds of all warps are there
  if (warp >= heads) return;
  // A head's softmax over the tile. What has no bound (keys overflow or are no numbers) is infinite: it is to
  // be seen.
  const int32_t tile = static_cast<int32_t>(blockIdx.x);
  float x[4], largest = -FLT_MAX;
  bool unbound[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int page = lane * 4 + i;
    x[i] = bounds[warp][page];
    unbound[i] = !(x[i] <= FLT_MAX);
    if (unbound[i] || first + page >= before) x[i] = -INFINITY;
    largest = fmaxf(largest, x[i]);
  }
#pragma unroll
  for (int step = kWarpLanes / 2; step >= 1; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = expf(x[i] - largest);
  const float sum = warp_sum((x[0] + x[1]) + (x[2] + x[3]));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (unbound[i] && first + lane * 4 + i < before) x[i] = INFINITY;
  }
  const int64_t head = first_head + warp;
  *reinterpret_cast<float4*>(p.weights + head * p.pages + first + lane * 4) = {x[0], x[1], x[2], x[3]};
  if (lane == 0) p.tiles[head * (p.pages / kSummaryTile) + tile] = {largest, sum};
}

// ---------------------------------------------------------------- the choice

constexpr int kChooseThreads = kSelectThreads, kChooseWarps = kChooseThreads / kWarpLanes;
constexpr int kMaxGroup = 128;               // query heads of a KV head
constexpr size_t kMaxKeyBytes = 160 * 1024;  // of weights in shared memory

struct alignas(16) ChooseShared {  // keys may follow it
  SelectShared select;
  float largest[kMaxGroup], factor[kMaxGroup];  // of a head's softmax: its largest bound, 1 / sum
};

// The weights of pages [0, before), as numbers in their order, into keys: sums over the heads of a KV head.
__device__ void weigh_pages(const SparseRows& p, int64_t first_head, int group, int32_t before,
                            ChooseShared& shared, uint32_t* keys) {
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int32_t tiles = (before + kSummaryTile - 1) / kSummaryTile, stride = p.pages / kSummaryTile;
  for (int g = warp; g < group; g += kChooseWarps) {
    const float2* of_head = p.tiles + (first_head + g) * stride;
    float largest = -FLT_MAX, sum = 0.0f;
    for (int32_t t = lane; t < tiles; t += kWarpLanes) largest = fmaxf(largest, of_head[t].x);
#pragma unroll
    for (int step = kWarpLanes / 2; step >= 1; step /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
    for (int32_t t = lane; t < tiles; t += kWarpLanes)
      sum = fmaf(of_head[t].y, expf(of_head[t].x - largest), sum);
    sum = warp_sum(sum);
    if (lane == 0) shared.largest[g] = largest, shared.factor[g] = sum > 0.0f ? 1.0f / sum : 0.0f;
  }
  __syncthreads();  // largest and factor of all heads are there
  for (int32_t t = warp; t < tiles; t += kChooseWarps) {
    float w[4] = {};
#pragma unroll 8
    for (int g = 0; g < group; ++g) {
      const float4 in_tile = *reinterpret_cast<const float4*>(p.weights + (first_head + g) * p.pages +
                                                              t * kSummaryTile + lane * 4);
      const float by = expf(p.tiles[(first_head + g) * stride + t].x - shared.largest[g]) * shared.factor[g];
      const float x[4] = {in_tile.x, in_tile.y, in_tile.z, in_tile.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = x[i] == INFINITY ? INFINITY : fmaf(x[i], by, w[i]);
    }
    *reinterpret_cast<uint4*>(keys + t * kSummaryTile + lane * 4) = {
        __float_as_uint(w[0]), __float_as_uint(w[1]), __float_as_uint(w[2]), __float_as_uint(w[3])};
  }
  __syncthreads();  // all keys are there
}

// grid: rows, KV heads.
template <class T, bool kSwizzled>
__global__ void __launch_bounds__(kChooseThreads)
    choose_pages_kernel(const __grid_constant__ SparseRows p, bool keys_in_shared) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<ChooseShared*>(memory);
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int64_t row = blockIdx.x;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int32_t position = p.cache.positions[row], own = position / kBlockTokens, budget = p.budgets[row];
  const int32_t* table = table_of_row(p.cache, row);
  if (p.summarizes && budget > 0 && position % kBlockTokens == kBlockTokens - 1) {
    summarize<T, kSwizzled>(p.cache, p.summaries, table[own], kv_head);
  }
  const int64_t task = row * p.cache.kv_heads + kv_head;
  const int32_t before = pages_to_choose_from(p, row);
  if (before == 0) {  // everything is read
    if (threadIdx.x == 0) {
      p.tables[task] = table;
      if (kv_head == 0) p.positions[row] = position;
    }
    return;
  }
  const int group = p.cache.heads / p.cache.kv_heads;
  const int64_t first_head = row * p.cache.heads + kv_head * group;
  // Else where the first head's weights were: who writes one has read it.
  uint32_t* keys = keys_in_shared ? reinterpret_cast<uint32_t*>(memory + sizeof(ChooseShared))
                                  : reinterpret_cast<uint32_t*>(p.weights + first_head * p.pages);
  weigh_pages(p, first_head, group, before, shared, keys);

  const PageChoice choice = page_choice(budget, own + 1);
  int32_t* chosen = p.chosen + task * p.pages;
  select_largest(keys, choice.first, choice.last, choice.wanted, shared.select,
                 [&](int32_t i, int32_t page) { chosen[kSinkPages + i] = table[page]; });
  if (threadIdx.x < kSinkPages) chosen[threadIdx.x] = table[threadIdx.x];
  for (int32_t i = choice.last + static_cast<int32_t>(threadIdx.x); i <= own; i += kChooseThreads)
    chosen[kSinkPages + choice.wanted + i - choice.last] = table[i];
  // The chosen pages are a context of their own, whose last page is the row's.
  if (threadIdx.x == 0) {
    p.tables[task] = chosen;
    if (kv_head == 0) p.positions[row] = (budget - 1) * kBlockTokens + position % kBlockTokens;
  }
}

template <int kLanes, int kVectors, int kHeads>
void launch_bounds_as(const SparseRows& op, const Launch& at) {
  const int32_t group = op.cache.heads / op.cache.kv_heads, passes = (group + kHeads - 1) / kHeads;
  const dim3 grid(static_cast<unsigned>((op.most_before + kSummaryTile - 1) / kSummaryTile),
                  static_cast<unsigned>(op.cache.kv_heads * passes), static_cast<unsigned>(op.rows));
  launch_dependent("page_bounds_kernel", page_bounds_kernel<kLanes, kVectors, kHeads>, grid, kBoundThreads, 0,
                   at, op, passes);
}

// Heads of a pass: as many as registers and lanes have room for.
template <int kLanes, int kVectors, int kMost>
void launch_bounds_of_heads(const SparseRows& op, const Launch& at) {
  const int32_t group = op.cache.heads / op.cache.kv_heads;
  if constexpr (kMost >= 8) {
    if (group > 4) return launch_bounds_as<kLanes, kVectors, 8>(op, at);
  }
  if constexpr (kMost >= 4) {
    if (group > 2) return launch_bounds_as<kLanes, kVectors, 4>(op, at);
  }
  if (group > 1) return launch_bounds_as<kLanes, kVectors, 2>(op, at);
  launch_bounds_as<kLanes, kVectors, 1>(op, at);
}

void launch_bounds(const SparseRows& op, const Launch& at) {
  const int32_t dim = op.summaries.padded_dim;
  if (dim <= 16) return launch_bounds_of_heads<4, 1, 4>(op, at);
  if (dim <= 32) return launch_bounds_of_heads<8, 1, 8>(op, at);
  if (dim <= 64) return launch_bounds_of_heads<16, 1, 8>(op, at);
  if (dim <= 128) return launch_bounds_of_heads<32, 1, 8>(op, at);
  if (dim <= 256) return launch_bounds_of_heads<32, 2, 4>(op, at);
  launch_bounds_of_heads<32, 4, 2>(op, at);
}

}  // namespace

size_t sparse_row_bytes(int32_t heads, int32_t kv_heads, int32_t pages) {
  const auto h = static_cast<size_t>(heads), kv = static_cast<size_t>(kv_heads),
             n = static_cast<size_t>(pages);
  return h * n * sizeof(float) + h * (n / kSummaryTile) * sizeof(float2) + kv * n * sizeof(int32_t) +
         kv * sizeof(void*) + sizeof(int32_t);
}

void launch_choose_pages(const SparseRows& op, const Launch& at) {
  if (op.rows == 0) return;
  MILLRACE_CHECK(op.pages % kSummaryTile == 0 && op.most_before <= op.pages);
  MILLRACE_CHECK(op.summaries.padded_dim % 16 == 0 && op.summaries.padded_dim <= 512);
  MILLRACE_CHECK(op.cache.heads <= kMaxGroup * op.cache.kv_heads);
  if (op.most_before > 0) launch_bounds(op, at);
  const size_t key_bytes = static_cast<size_t>((op.most_before + kSummaryTile - 1) / kSummaryTile) *
                           kSummaryTile * sizeof(uint32_t);
  const bool in_shared = key_bytes <= kMaxKeyBytes;
  const size_t bytes = sizeof(ChooseShared) + (in_shared ? key_bytes : 0);
  with_cache_order(op.cache, [&](auto element, auto swizzled) {
    const auto kernel = choose_pages_kernel<decltype(element), decltype(swizzled)::value>;
    allow_shared_memory(kernel, sizeof(ChooseShared) + kMaxKeyBytes);
    launch_dependent("choose_pages_kernel", kernel,
                     dim3(static_cast<unsigned>(op.rows), static_cast<unsigned>(op.cache.kv_heads)),
                     kChooseThreads, bytes, at, op, in_shared);
  });
}

void launch_summarize_rows(const SparseRows& op, const Launch& at) {
  if (op.rows == 0) return;
  const dim3 grid(static_cast<unsigned>(op.rows), static_cast<unsigned>(op.cache.kv_heads));
  with_cache_order(op.cache, [&](auto element, auto swizzled) {
    summarize_rows_kernel<decltype(element), decltype(swizzled)::value>
        <<<grid, kSummaryThreads, 0, at.stream>>>(op.cache, op.summaries, op.budgets);
  });
  check_launch("summarize_rows_kernel");
}

void launch_summarize_block(const LayerCache& cache, const PageSummaries& to, int32_t block,
                            const Launch& at) {
  with_cache_order(cache, [&](auto element, auto swizzled) {
    summarize_block_kernel<decltype(element), decltype(swizzled)::value>
        <<<static_cast<unsigned>(cache.kv_heads), kSummaryThreads, 0, at.stream>>>(cache, to, block);
  });
  check_launch("summarize_block_kernel");
}

}  // namespace millrace::cuda
