// The tokens of an indexer (indexed.h): scores, choice, copy.
//
// Roofline: multiply-adds of the scores, index_heads * index_dim a token of context, in float32: 64 x 128 at
// 131,072 tokens are 37 us of an H200's CUDA cores for a row; what is read from shared memory takes longer.
#include "kernels/cuda/attention/indexed.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/attention/latent_cache.cuh"
#include "kernels/cuda/attention/top_select.cuh"
#include "kernels/cuda/device.h"
#include "kernels/cuda/tile/launch.cuh"
#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kScoreThreads = 256, kHeadGroups = kScoreThreads / kIndexTile;
constexpr int kHeadsAtOnce = 8;
constexpr int kCopyThreads = 128;

__host__ __device__ inline int whole_fours(int x) { return (x + 3) / 4 * 4; }
__host__ __device__ inline int32_t blocks_of_top(int32_t top) {
  return (top + kBlockTokens - 1) / kBlockTokens;
}

// Positions that a row sees, if they are more than it reads; else 0.
__device__ inline int32_t tokens_to_choose_from(const IndexedRows& p, int64_t row) {
  const int32_t seen = p.cache.positions[row] + 1;
  return seen > p.top ? seen : 0;
}

size_t score_shared_bytes(const IndexedRows& op) {
  const auto dim = static_cast<size_t>(whole_fours(op.index.head_dim)),
             heads = static_cast<size_t>(op.index.heads);
  return (heads * dim + size_t{kIndexTile} * (dim + 1) + heads + size_t{kScoreThreads}) * sizeof(float);
}

// grid: tiles of kIndexTile tokens, rows. A thread has a token and every kHeadGroups-th head; the groups'
// sums are added in order. Shared: queries [heads][dim], keys [tokens][dim + 1], weights, sums; dim in whole
// fours.
template <class T>
__global__ void __launch_bounds__(kScoreThreads) index_scores_kernel(const __grid_constant__ IndexedRows p) {
  extern __shared__ __align__(16) float memory[];
  const int64_t row = blockIdx.y;
  const int32_t seen = tokens_to_choose_from(p, row), first = static_cast<int32_t>(blockIdx.x) * kIndexTile;
  if (first >= seen) return;
  const int size = p.index.head_dim, dim = whole_fours(size), heads = p.index.heads;
  float *queries = memory, *keys = queries + heads * dim, *weights = keys + kIndexTile * (dim + 1),
        *sums = weights + heads;
  for (int i = threadIdx.x; i < heads * dim; i += kScoreThreads)
    queries[i] = i % dim < size ? p.query[(row * heads + i / dim) * size + i % dim] : 0.0f;
  for (int i = threadIdx.x; i < heads; i += kScoreThreads) weights[i] = p.weights[row * heads + i];
  const int32_t* table = table_of_row(p.index, row);
  for (int i = threadIdx.x; i < kIndexTile * dim; i += kScoreThreads) {
    const int token = i / dim, d = i % dim;
    const int32_t at = first + token;
    float key = 0.0f;
    if (at < seen && d < size)
      key = LatentBlock<T, false>(p.index, table[at / kBlockTokens]).at(at % kBlockTokens, d);
    keys[token * (dim + 1) + d] = key;
  }
  __syncthreads();  // queries, keys and weights are there
  const int token = threadIdx.x % kIndexTile, group = threadIdx.x / kIndexTile;
  const float* key = keys + token * (dim + 1);
  float sum = 0.0f;
  for (int h = group; h < heads; h += kHeadGroups * kHeadsAtOnce) {
    float dot[kHeadsAtOnce] = {};
    for (int d = 0; d < dim; d += 4) {
      const float k[4] = {key[d], key[d + 1], key[d + 2], key[d + 3]};
#pragma unroll
      for (int i = 0; i < kHeadsAtOnce; ++i) {
        const int head = min(h + i * kHeadGroups, heads - 1);
        const float4 q = *reinterpret_cast<const float4*>(queries + head * dim + d);
        dot[i] = fmaf(k[0], q.x, dot[i]);
        dot[i] = fmaf(k[1], q.y, dot[i]);
        dot[i] = fmaf(k[2], q.z, dot[i]);
        dot[i] = fmaf(k[3], q.w, dot[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kHeadsAtOnce; ++i) {
      const int head = h + i * kHeadGroups;
      if (head < heads) sum = fmaf(weights[head], dot[i] < 0.0f ? 0.0f : dot[i], sum);
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();  // every group's sums are there
  if (group > 0 || first + token >= seen) return;
#pragma unroll
  for (int g = 1; g < kHeadGroups; ++g) sum += sums[g * kIndexTile + token];
  p.scores[row * p.context + first + token] = sum;
}

// Numbers whose order is that of scores; both zeros are one, and what is no number comes first: it is to be
// seen.
__device__ inline uint32_t in_order(float score) {
  if (isnan(score)) return UINT32_MAX;
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// grid: rows.
__global__ void __launch_bounds__(kSelectThreads)
    choose_tokens_kernel(const __grid_constant__ IndexedRows p) {
  __shared__ SelectShared shared;
  const int64_t row = blockIdx.x;
  const int32_t row_blocks = blocks_of_top(p.top), seen = tokens_to_choose_from(p, row);
  int32_t* blocks = p.blocks + row * row_blocks;
  for (int32_t b = threadIdx.x; b < row_blocks; b += kSelectThreads)
    blocks[b] = static_cast<int32_t>(row) * row_blocks + b;
  if (threadIdx.x == 0) {
    p.tables[row] = blocks;
    p.positions[row] = seen > 0 ? p.top - 1 : p.cache.positions[row];
  }
  int32_t* tokens = p.tokens + row * p.top;
  if (seen == 0) {
    for (int32_t t = threadIdx.x; t < p.top; t += kSelectThreads) tokens[t] = t;
    return;
  }
  // Where the scores are: who writes one has read it.
  auto* keys = reinterpret_cast<uint32_t*>(p.scores + row * p.context);
  for (int32_t t = threadIdx.x; t < seen; t += kSelectThreads) keys[t] = in_order(__uint_as_float(keys[t]));
  __syncthreads();  // all keys are there
  select_largest(keys, 0, seen, p.top, shared, [&](int32_t i, int32_t token) { tokens[i] = token; });
}

template <class T, bool kSwizzled>
__device__ void copy_key(const LatentBlock<T, kSwizzled>& from, int at, const LatentBlock<T, kSwizzled>& to,
                         int to_at, int lane) {
  // Both orders keep eight dimensions together.
  if (kSwizzled) {
    for (int d = lane * 8; d < from.dim; d += kWarpLanes * 8) {
      *reinterpret_cast<uint4*>(to.keys + to.offset(to_at, d)) =
          *reinterpret_cast<const uint4*>(from.keys + from.offset(at, d));
    }
  } else {
    for (int d = lane; d < from.dim; d += kWarpLanes)
      to.keys[to.offset(to_at, d)] = from.keys[from.offset(at, d)];
  }
}
template <bool kSwizzled>
__device__ void copy_key(const LatentBlock<Fp8Code, kSwizzled>& from, int at,
                         const LatentBlock<Fp8Code, kSwizzled>& to, int to_at, int lane) {
  for (int d = lane; d < from.dim; d += kWarpLanes)
    to.codes[to_at * to.dim + d] = from.codes[at * from.dim + d];
  if (lane == 0) to.scales[to_at] = from.scales[at];
}

// grid: rows, blocks of a row's choice. A warp per token.
template <class T, bool kSwizzled>
__global__ void __launch_bounds__(kCopyThreads)
    copy_tokens_kernel(const __grid_constant__ IndexedRows p, LayerCache chosen) {
  const int64_t row = blockIdx.x;
  const int32_t row_blocks = blocks_of_top(p.top), b = static_cast<int32_t>(blockIdx.y);
  const int32_t read = min(p.top, p.cache.positions[row] + 1);
  const int32_t* table = table_of_row(p.cache, row);
  const LatentBlock<T, kSwizzled> to(chosen, static_cast<int32_t>(row) * row_blocks + b);
  for (int i = threadIdx.x / kWarpLanes; i < kBlockTokens; i += kCopyThreads / kWarpLanes) {
    const int32_t at = b * kBlockTokens + i;
    if (at >= read) return;
    const int32_t token = p.tokens[row * p.top + at];
    const LatentBlock<T, kSwizzled> from(p.cache, table[token / kBlockTokens]);
    copy_key(from, token % kBlockTokens, to, i, static_cast<int>(threadIdx.x) % kWarpLanes);
  }
}

}  // namespace

int64_t indexed_block_elements(DType type, int32_t dim) {
  return int64_t{kBlockTokens} * (dim + (type == DType::kF8E4M3 ? 1 : 0));
}

size_t indexed_row_bytes(const IndexedRows& shape) {
  const auto blocks = static_cast<size_t>(blocks_of_top(shape.top));
  const size_t element = shape.cache.type == DType::kF32 ? 4 : shape.cache.type == DType::kF8E4M3 ? 1 : 2;
  return static_cast<size_t>(shape.context + shape.top) * 4 +
         blocks * (4 + static_cast<size_t>(indexed_block_elements(shape.cache.type, shape.cache.head_dim)) *
                           element) +
         sizeof(void*) + 4;
}

void launch_choose_tokens(const IndexedRows& op, const Launch& at) {
  if (op.rows == 0) return;
  MILLRACE_CHECK(op.top > 0 && op.most_seen <= op.context && op.index.order == CacheOrder::kRows);
  const size_t shared_bytes = score_shared_bytes(op);
  MILLRACE_CHECK(shared_bytes <= at.device.max_shared_memory());
  const auto rows = static_cast<unsigned>(op.rows);
  if (op.most_seen > op.top) {
    const dim3 grid(static_cast<unsigned>((op.most_seen + kIndexTile - 1) / kIndexTile), rows);
    with_cache_type(op.index.type, [&](auto element) {
      const auto kernel = index_scores_kernel<decltype(element)>;
      allow_shared_memory(kernel, shared_bytes);
      kernel<<<grid, kScoreThreads, shared_bytes, at.stream>>>(op);
    });
    check_launch("index_scores_kernel");
  }
  choose_tokens_kernel<<<rows, kSelectThreads, 0, at.stream>>>(op);
  check_launch("choose_tokens_kernel");
  LayerCache chosen = op.cache;
  chosen.pool = op.chosen;
  chosen.layer_offset = 0;
  chosen.block_elements = indexed_block_elements(op.cache.type, op.cache.head_dim);
  const dim3 grid(rows, static_cast<unsigned>(blocks_of_top(op.top)));
  const auto copy = [&](auto kernel) {
    kernel<<<grid, kCopyThreads, 0, at.stream>>>(op, chosen);
    check_launch("copy_tokens_kernel");
  };
  if (op.cache.order == CacheOrder::kSwizzled && op.cache.type == DType::kBF16)
    return copy(copy_tokens_kernel<__nv_bfloat16, true>);
  with_cache_type(op.cache.type, [&](auto element) { copy(copy_tokens_kernel<decltype(element), false>); });
}

}  // namespace millrace::cuda
