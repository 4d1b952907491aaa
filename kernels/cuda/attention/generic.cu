// Attention over the paged cache: one CTA per (row, head), softmax on the way (running maximum and sum),
// block after block of 16 positions counted from the start of the sequence. What a row gets depends on its
// position, the window and the cache alone, so chunks and batches give the same bits.
#include "kernels/cuda/attention/kv_cache.cuh"
#include "kernels/cuda/device.h"
#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpLanes;

// Weights of a block's positions [low, high] against the new maximum; zero outside.
struct BlockWeights {
  float weight[kBlockTokens];
  float correction;  // what everything summed so far is multiplied with
};

// Folds a block's scores into the running maximum and sum. Every thread does it alike.
__device__ inline BlockWeights fold_scores(const float* scores, int low, int high, float& top, float& sum) {
  float new_top = top;
#pragma unroll
  for (int j = 0; j < kBlockTokens; ++j) {
    if (j >= low && j <= high) new_top = fmaxf(new_top, scores[j]);
  }
  BlockWeights block;
  block.correction = top == new_top ? 1.0f : expf(top - new_top);
  sum *= block.correction;
#pragma unroll
  for (int j = 0; j < kBlockTokens; ++j) {
    const bool counts = j >= low && j <= high && scores[j] != -INFINITY;
    block.weight[j] = counts ? expf(scores[j] - new_top) : 0.0f;
    sum += block.weight[j];
  }
  top = new_top;
  return block;
}

// shared: q [dim], out [dim] (a thread owns its elements), scores [2][16].
template <class T>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(LayerCache cache, AttentionParams op, const float* query, float* out) {
  extern __shared__ float shared[];
  const int dim = cache.head_dim;
  float* q = shared;
  float* sums = shared + dim;
  float* scores = shared + 2 * dim;
  const int64_t row = blockIdx.x;
  const int head = blockIdx.y, kv_head = head / (cache.heads / cache.kv_heads);
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int64_t at = (row * cache.heads + head) * dim;
  for (int d = threadIdx.x; d < dim; d += kThreads) {
    q[d] = query[at + d];
    sums[d] = 0.0f;
  }
  __syncthreads();  // the query is there before any warp multiplies with it

  const int32_t position = cache.positions[row];
  const int32_t first = op.window > 0 && position >= op.window ? position - op.window + 1 : 0;
  const int32_t* table = table_of_row(cache, row);
  float top = -INFINITY, sum = 0.0f;
  for (int32_t b = first / kBlockTokens; b <= position / kBlockTokens; ++b) {
    const HeadRows<T> rows(cache, table[b], kv_head);
    const int low = max(first - b * kBlockTokens, 0),
              high = min(position - b * kBlockTokens, kBlockTokens - 1);
    float* mine = scores + (b & 1) * kBlockTokens;
    for (int j = warp; j < kBlockTokens; j += kWarps) {
      if (j < low || j > high) continue;  // the whole warp alike
      float dot = 0.0f;
      for (int d = lane; d < dim; d += kWarpLanes) dot = fmaf(q[d], rows.key(j, d), dot);
      dot = warp_sum(dot);
      if (lane == 0) mine[j] = dot * op.scale;
    }
    // All scores of this block are there. A warp that runs ahead writes the other half, whose readers have
    // all passed this barrier.
    __syncthreads();
    const BlockWeights weights = fold_scores(mine, low, high, top, sum);
    for (int d = threadIdx.x; d < dim; d += kThreads) {
      float value = sums[d] * weights.correction;
#pragma unroll
      for (int j = 0; j < kBlockTokens; ++j) {
        if (j >= low && j <= high) value = fmaf(weights.weight[j], rows.value(j, d), value);
      }
      sums[d] = value;
    }
  }

  float correction = 1.0f;
  if (op.sinks != nullptr) {
    const float sink = op.sinks[head], new_top = fmaxf(top, sink);
    correction = top == new_top ? 1.0f : expf(top - new_top);
    sum = sum * correction + expf(sink - new_top);
  }
  for (int d = threadIdx.x; d < dim; d += kThreads) out[at + d] = sums[d] * correction / sum;
}

}  // namespace

void launch_attention(const LayerCache& cache, const AttentionParams& op, int64_t rows, const float* query,
                      float* out, const Launch& at) {
  if (rows == 0) return;
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(cache.heads));
  const size_t shared_bytes = (2 * static_cast<size_t>(cache.head_dim) + 2 * kBlockTokens) * sizeof(float);
  with_cache_type(cache.type, [&](auto element) {
    attention_kernel<decltype(element)><<<grid, kThreads, shared_bytes, at.stream>>>(cache, op, query, out);
  });
  check_launch("attention_kernel");
}

}  // namespace millrace::cuda
