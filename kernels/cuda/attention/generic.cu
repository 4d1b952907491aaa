// Attention over the paged cache for every type and head size: one CTA per (row, head), an online softmax
// (row_max and row_sum), block after block of 16 positions counted from the start of the sequence. What a row
// gets depends on its position, the window and the cache alone, so chunks and batches give the same bits.
//
// Roofline: the bytes of the context / 4.3 TB/s, once per query head (again out of L2); far from it, since a
// CTA has one block's latency after the other.
#include "kernels/cuda/attention/kv_cache.cuh"
#include "kernels/cuda/device.h"
#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpLanes;

// Probabilities of a block's positions [low, high] against the new row_max; zero outside.
struct BlockProbs {
  float prob[kBlockTokens];
  float correction;  // what everything summed so far is multiplied with
};

// Takes a block's scores into row_max and row_sum. Every thread does it alike.
__device__ inline BlockProbs softmax(const float* scores, int low, int high, float& row_max, float& row_sum) {
  float new_max = row_max;
#pragma unroll
  for (int j = 0; j < kBlockTokens; ++j) {
    if (j >= low && j <= high) new_max = fmaxf(new_max, scores[j]);
  }
  BlockProbs block;
  block.correction = row_max == new_max ? 1.0f : expf(row_max - new_max);
  row_sum *= block.correction;
#pragma unroll
  for (int j = 0; j < kBlockTokens; ++j) {
    const bool counts = j >= low && j <= high && scores[j] != -INFINITY;
    block.prob[j] = counts ? expf(scores[j] - new_max) : 0.0f;
    row_sum += block.prob[j];
  }
  row_max = new_max;
  return block;
}

// The positions that a row sees, first to last.
__device__ inline int2 seen_from(const LayerCache& cache, const AttentionParams& op,
                                 const AttentionLimits& limits, int64_t row) {
  const int32_t position = cache.positions[row];
  const int32_t first = op.window > 0      ? max(position - op.window + 1, 0)
                        : limits.chunk > 0 ? position / limits.chunk * limits.chunk
                                           : 0;
  if (limits.lengths == nullptr) return {first, position};
  const int32_t last = limits.lengths[cache.sequence_of[row]] - 1;
  return {first, op.window > 0 && !limits.both_ways ? min(last, position + op.window - 1) : last};
}

// shared: q [dim], out [dim] (a thread owns its elements), scores [2][16].
template <class T, bool kSwizzled>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(LayerCache cache, AttentionParams op, AttentionLimits limits, const float* query,
                     float* out) {
  extern __shared__ float shared[];
  const int dim = cache.head_dim;
  float* q = shared;
  float* acc = shared + dim;
  float* scores = shared + 2 * dim;
  const int64_t row = blockIdx.x;
  const int head = blockIdx.y, kv_head = head / (cache.heads / cache.kv_heads);
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int64_t at = (row * cache.heads + head) * dim;
  for (int d = threadIdx.x; d < dim; d += kThreads) {
    q[d] = query[at + d];
    acc[d] = 0.0f;
  }
  __syncthreads();  // the query is there before any warp multiplies with it

  const auto [first, last] = seen_from(cache, op, limits, row);
  const int32_t* table = table_of_row(cache, row, kv_head);
  float row_max = -INFINITY, row_sum = 0.0f;
  for (int32_t b = first / kBlockTokens; b <= last / kBlockTokens; ++b) {
    const HeadRows<T, kSwizzled> rows(cache, table[b], kv_head);
    const int low = max(first - b * kBlockTokens, 0), high = min(last - b * kBlockTokens, kBlockTokens - 1);
    float* mine = scores + (b & 1) * kBlockTokens;
    for (int j = warp; j < kBlockTokens; j += kWarps) {
      if (j < low || j > high) continue;  // the whole warp alike
      float dot = 0.0f;
      for (int d = lane; d < dim; d += kWarpLanes) dot = fmaf(q[d], rows.key(j, d), dot);
      dot = warp_sum(dot);
      const float score = dot * op.scale;
      if (lane == 0) mine[j] = limits.softcap > 0.0f ? limits.softcap * tanhf(score / limits.softcap) : score;
    }
    // All scores of this block are there. A warp that runs ahead writes the other half, whose readers have
    // all passed this barrier.
    __syncthreads();
    const BlockProbs probs = softmax(mine, low, high, row_max, row_sum);
    for (int d = threadIdx.x; d < dim; d += kThreads) {
      float value = acc[d] * probs.correction;
#pragma unroll
      for (int j = 0; j < kBlockTokens; ++j) {
        if (j >= low && j <= high) value = fmaf(probs.prob[j], rows.value(j, d), value);
      }
      acc[d] = value;
    }
  }

  float correction = 1.0f;
  if (op.sinks != nullptr) {
    const float sink = op.sinks[head], new_max = fmaxf(row_max, sink);
    correction = row_max == new_max ? 1.0f : expf(row_max - new_max);
    row_sum = row_sum * correction + expf(sink - new_max);
  }
  for (int d = threadIdx.x; d < dim; d += kThreads) out[at + d] = acc[d] * correction / row_sum;
}

}  // namespace

void launch_attention(const LayerCache& cache, const AttentionParams& op, int64_t rows, const float* query,
                      float* out, const Launch& at, const AttentionLimits& limits) {
  if (rows == 0) return;
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(cache.heads));
  const size_t shared_bytes = (2 * static_cast<size_t>(cache.head_dim) + 2 * kBlockTokens) * sizeof(float);
  const auto launch = [&](auto kernel) {
    kernel<<<grid, kThreads, shared_bytes, at.stream>>>(cache, op, limits, query, out);
    check_launch("attention_kernel");
  };
  if (cache.order == CacheOrder::kSwizzled) {  // what the tensor cores read: bf16 and fp8
    return cache.type == DType::kBF16 ? launch(attention_kernel<__nv_bfloat16, true>)
                                      : launch(attention_kernel<Fp8Code, true>);
  }
  with_cache_type(cache.type, [&](auto element) { launch(attention_kernel<decltype(element), false>); });
}

}  // namespace millrace::cuda
