// Around latent attention (keys and queries out of what was compressed, the append), and the attention for
// every type and size: a CTA has up to eight heads of one row, which share what it reads; an online softmax
// goes block after block of 16 positions counted from the start of the sequence. What a row gets depends on
// its position and the cache alone, so chunks and batches give the same bits.
//
// Roofline: the bytes of the context / 4.3 TB/s, once for eight heads (again out of L2); far from it, since a
// CTA has one block's latency after the other. Real sizes have the kernel of latent_wgmma.cu.
#include "kernels/cuda/attention/latent.h"

#include "kernels/cuda/attention/latent_cache.cuh"
#include "kernels/cuda/tile/launch.cuh"
#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpLanes;
constexpr int kMaxHeads = 8;  // of a CTA

// ---------------------------------------------------------------- keys, queries, the append

// One CTA per row.
__global__ void __launch_bounds__(kThreads) latent_keys_kernel(LatentKeys op) {
  __shared__ float partial[kWarps];
  const int64_t row = blockIdx.x;
  const float* from = op.compressed + row * (op.rank + op.rope);
  float* to = op.key + row * (op.rank + op.rope);
  for (int d = threadIdx.x; d < op.rope; d += kThreads) to[d] = from[op.rank + d];
  float by = 1.0f;
  if (op.norm_weight != nullptr) {
    float squares = 0.0f;
    for (int d = threadIdx.x; d < op.rank; d += kThreads) squares = fmaf(from[d], from[d], squares);
    squares = block_sum<kThreads>(squares, partial);
    by = 1.0f / sqrtf(squares / static_cast<float>(op.rank) + op.eps);
  }
  for (int d = threadIdx.x; d < op.rank; d += kThreads) {
    to[op.rope + d] = from[d] * by * (op.norm_weight != nullptr ? op.norm_weight[d] : 1.0f);
  }
}

// One CTA per row.
__global__ void __launch_bounds__(kThreads)
    latent_rope_queries_kernel(const float* q, int heads, int nope, int rope, int rank, float* query) {
  const int64_t row = blockIdx.x;
  for (int i = threadIdx.x; i < heads * rope; i += kThreads) {
    const int64_t head = row * heads + i / rope;
    query[head * (rope + rank) + i % rope] = q[head * (nope + rope) + nope + i % rope];
  }
}

__device__ inline void rotate(const RopeParams& op, int i, float2 by, float* x) {
  float& a = op.interleaved ? x[2 * i] : x[i];
  float& b = op.interleaved ? x[2 * i + 1] : x[i + op.half];
  const float a0 = a, b0 = b;
  a = fmaf(a0, by.x, -(b0 * by.y));
  b = fmaf(b0, by.x, a0 * by.y);
}

template <class T>
__device__ void store_key(T, const LayerCache& cache, int32_t block, int in_block, const float* key) {
  const int dim = cache.head_dim;
  T* to = keys_of_block<T>(cache, block, 0);
  for (int d = threadIdx.x; d < dim; d += kThreads)
    store_cache(key[d], to + cache_offset(cache, in_block, d));
}
// By one warp: the scale is the largest dimension's.
__device__ void store_key(Fp8Code, const LayerCache& cache, int32_t block, int in_block, const float* key) {
  if (threadIdx.x >= kWarpLanes) return;
  const LatentBlock<Fp8Code, false> to(cache, block);
  uint32_t largest = 0;
  for (int d = threadIdx.x; d < to.dim; d += kWarpLanes) largest = max(largest, magnitude_bits(key[d]));
  const uint8_t scale = fp8_scale_of_warp(largest);
  for (int d = threadIdx.x; d < to.dim; d += kWarpLanes) {
    to.codes[in_block * to.dim + d] = fp8_code(key[d], scale);
  }
  if (threadIdx.x == 0) to.scales[in_block] = scale;
}

// One CTA per row; its angles are for all heads.
template <class T>
__global__ void __launch_bounds__(kThreads)
    latent_append_kernel(LayerCache cache, RopeParams op, const float2* angles, float* query, float* key) {
  const int64_t row = blockIdx.x;
  const float2* by = angles + row * op.half;
  const int dim = cache.head_dim;
  float *my_key = key + row * dim, *my_query = query + row * cache.heads * dim;
  for (int i = threadIdx.x; i < (cache.heads + 1) * op.half; i += kThreads) {
    const int head = i / op.half, pair = i % op.half;
    rotate(op, pair, by[pair], head < cache.heads ? my_query + head * dim : my_key);
  }
  __syncthreads();  // the whole key is rotated before any of it is copied
  const int32_t position = cache.positions[row];
  store_key(T{}, cache, table_of_row(cache, row)[position / kBlockTokens], position % kBlockTokens, my_key);
}

// ---------------------------------------------------------------- attention

// How a CTA's shared memory lies: q [heads][dim], acc [heads][rank], scores [2][heads][16].
struct GenericShared {
  float *q, *acc, *scores;
  __device__ GenericShared(float* base, const LatentAttention& p, int heads)
      : q(base), acc(q + heads * (p.rope + p.rank)), scores(acc + heads * p.rank) {}
};
size_t generic_shared_bytes(const LatentAttention& p, int heads) {
  return static_cast<size_t>(heads) * static_cast<size_t>(p.rope + 2 * p.rank + 2 * kBlockTokens) *
         sizeof(float);
}

// Scores of the block's first `count` positions for `here` heads: a warp has a position, its lanes the
// dimensions.
template <class Block>
__device__ inline void score_block(const Block& block, const LatentAttention& p, const GenericShared& shared,
                                   int here, int count, float* scores) {
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes, dim = p.rope + p.rank;
  for (int j = warp; j < count; j += kWarps) {
    float dot[kMaxHeads] = {};
    for (int d = lane; d < dim; d += kWarpLanes) {
      const float key = block.at(j, d);
#pragma unroll
      for (int h = 0; h < kMaxHeads; ++h) {
        if (h < here) dot[h] = fmaf(shared.q[h * dim + d], key, dot[h]);
      }
    }
#pragma unroll
    for (int h = 0; h < kMaxHeads; ++h) {
      if (h >= here) break;
      const float sum = warp_sum(dot[h]);
      if (lane == 0) scores[h * kBlockTokens + j] = sum * p.scale;
    }
  }
}

// grid: rows, groups of `heads` heads.
template <class T, bool kSwizzled>
__global__ void __launch_bounds__(kThreads)
    latent_generic_kernel(const __grid_constant__ LatentAttention p, int heads) {
  extern __shared__ float memory[];
  const GenericShared shared(memory, p, heads);
  const int64_t row = blockIdx.x;
  const int first = static_cast<int>(blockIdx.y) * heads, here = min(heads, p.cache.heads - first);
  const int dim = p.rope + p.rank;
  const float* query = p.query + (row * p.cache.heads + first) * dim;
  float* out = p.out + (row * p.cache.heads + first) * dim;
  for (int i = threadIdx.x; i < here * dim; i += kThreads) shared.q[i] = query[i];
  for (int i = threadIdx.x; i < here * p.rank; i += kThreads) shared.acc[i] = 0.0f;
  __syncthreads();  // the queries are there before any warp multiplies with them

  const int32_t position = p.cache.positions[row];
  const int32_t* table = table_of_row(p.cache, row, 0);
  float row_max[kMaxHeads], row_sum[kMaxHeads];
#pragma unroll
  for (int h = 0; h < kMaxHeads; ++h) row_max[h] = -INFINITY, row_sum[h] = 0.0f;
  for (int32_t b = 0; b <= position / kBlockTokens; ++b) {
    const LatentBlock<T, kSwizzled> block(p.cache, table[b]);
    const int count = min(position - b * kBlockTokens + 1, kBlockTokens);
    float* scores = shared.scores + (b & 1) * heads * kBlockTokens;
    score_block(block, p, shared, here, count, scores);
    // All scores of this block are there. A warp that runs ahead writes the other half, whose readers have
    // all passed this barrier.
    __syncthreads();
    for (int h = 0; h < here; ++h) {  // every thread has all heads' sums alike
      const float* mine = scores + h * kBlockTokens;
      float old_max = -INFINITY;
#pragma unroll
      for (int i = 0; i < kMaxHeads; ++i) old_max = i == h ? row_max[i] : old_max;
      float new_max = old_max;
      for (int j = 0; j < count; ++j) new_max = fmaxf(new_max, mine[j]);
      const float correction = old_max == new_max ? 1.0f : expf(old_max - new_max);
      float prob[kBlockTokens], sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kBlockTokens; ++j) {
        prob[j] = j < count && mine[j] != -INFINITY ? expf(mine[j] - new_max) : 0.0f;
        sum += prob[j];
      }
#pragma unroll
      for (int i = 0; i < kMaxHeads; ++i) {
        if (i == h) row_max[i] = new_max, row_sum[i] = fmaf(row_sum[i], correction, sum);
      }
      for (int d = threadIdx.x; d < p.rank; d += kThreads) {  // a thread owns its elements of acc
        float value = shared.acc[h * p.rank + d] * correction;
#pragma unroll
        for (int j = 0; j < kBlockTokens; ++j) {
          if (j < count) value = fmaf(prob[j], block.at(j, p.rope + d), value);
        }
        shared.acc[h * p.rank + d] = value;
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kMaxHeads; ++h) {
    if (h >= here) break;
    for (int d = threadIdx.x; d < p.rank; d += kThreads) {
      out[h * dim + p.rope + d] = shared.acc[h * p.rank + d] / row_sum[h];
    }
  }
}

}  // namespace

void launch_latent_keys(const LatentKeys& op, const Launch& at) {
  if (op.rows == 0) return;
  latent_keys_kernel<<<static_cast<unsigned>(op.rows), kThreads, 0, at.stream>>>(op);
  check_launch("latent_keys_kernel");
}

void launch_latent_rope_queries(const float* q, int64_t rows, int32_t heads, int32_t nope, int32_t rope,
                                int32_t rank, float* query, const Launch& at) {
  if (rows == 0) return;
  latent_rope_queries_kernel<<<static_cast<unsigned>(rows), kThreads, 0, at.stream>>>(q, heads, nope, rope,
                                                                                      rank, query);
  check_launch("latent_rope_queries_kernel");
}

void launch_latent_append(const LayerCache& cache, const RopeParams& op, const float2* angles, int64_t rows,
                          float* query, float* key, const Launch& at) {
  if (rows == 0) return;
  with_cache_type(cache.type, [&](auto element) {
    latent_append_kernel<decltype(element)>
        <<<static_cast<unsigned>(rows), kThreads, 0, at.stream>>>(cache, op, angles, query, key);
  });
  check_launch("latent_append_kernel");
}

void launch_latent_generic(const LatentAttention& op, const Launch& at) {
  if (op.rows == 0) return;
  int heads = op.cache.heads < kMaxHeads ? op.cache.heads : kMaxHeads;
  constexpr size_t kUsualShared = 48 * 1024;
  while (heads > 1 && generic_shared_bytes(op, heads) > kUsualShared) heads /= 2;
  const size_t shared = generic_shared_bytes(op, heads);
  const dim3 grid(static_cast<unsigned>(op.rows),
                  static_cast<unsigned>((op.cache.heads + heads - 1) / heads));
  const auto launch = [&](auto kernel) {
    allow_shared_memory(kernel, shared);
    kernel<<<grid, kThreads, shared, at.stream>>>(op, heads);
    check_launch("latent_generic_kernel");
  };
  if (op.cache.order == CacheOrder::kSwizzled && op.cache.type == DType::kBF16) {
    return launch(latent_generic_kernel<__nv_bfloat16, true>);
  }
  with_cache_type(op.cache.type,
                  [&](auto element) { launch(latent_generic_kernel<decltype(element), false>); });
}

}  // namespace millrace::cuda
