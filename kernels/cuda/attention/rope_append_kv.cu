// RoPE on queries and keys, then keys and values into the paged cache, one CTA per row.
// Roofline: memory, the bytes that attention.h gives for launch_rope_append_kv; rows of a batch are in L2.
#include "kernels/cuda/attention/kv_cache.cuh"
#include "kernels/cuda/device.h"
#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 128;

// The angle is in double: at position 100,000 a float32 angle is off by thousandths.
__device__ inline float2 cos_sin_at(const RopeParams& op, int32_t position, int i) {
  double s, c;
  sincos(static_cast<double>(position) * static_cast<double>(op.inv_freq[i]), &s, &c);
  return {static_cast<float>(c * op.magnitude), static_cast<float>(s * op.magnitude)};
}

__device__ inline void rotate(const RopeParams& op, int i, float c, float s, float* x) {
  float& a = op.interleaved ? x[2 * i] : x[i];
  float& b = op.interleaved ? x[2 * i + 1] : x[i + op.half];
  const float a0 = a, b0 = b;
  a = fmaf(a0, c, -(b0 * s));
  b = fmaf(b0, c, a0 * s);
}

// A row's keys and values, [kv_heads, dim], to their place in a block; by all threads.
template <class T>
__device__ void append(T, const LayerCache& cache, int32_t block, int in_block, const float* key,
                       const float* value) {
  const int dim = cache.head_dim;
  for (int i = threadIdx.x; i < cache.kv_heads * dim; i += kThreads) {
    T* keys = keys_of_block<T>(cache, block, i / dim);
    const int at = cache_offset(cache, in_block, i % dim);
    store_cache(key[i], keys + at);
    store_cache(value[i], keys + value_distance(cache) + at);
  }
}
// A warp per head, key or value: its scale is the largest dimension's.
__device__ void append(Fp8Code, const LayerCache& cache, int32_t block, int in_block, const float* key,
                       const float* value) {
  const int dim = cache.head_dim, lane = threadIdx.x % kWarpLanes;
  const bool rows = cache.order == CacheOrder::kRows;
  for (int i = threadIdx.x / kWarpLanes; i < 2 * cache.kv_heads; i += kThreads / kWarpLanes) {
    const bool is_value = i >= cache.kv_heads;
    const int kv_head = is_value ? i - cache.kv_heads : i;
    const float* x = (is_value ? value : key) + kv_head * dim;
    const Fp8Head head = fp8_head(cache, block, kv_head);
    uint32_t max_magnitude = 0;
    for (int d = lane; d < dim; d += kWarpLanes) max_magnitude = max(max_magnitude, magnitude_bits(x[d]));
    const uint8_t scale = fp8_scale_of_warp(max_magnitude);
    uint8_t* codes = is_value ? head.values : head.keys;
    for (int d = lane; d < dim; d += kWarpLanes) {
      const int at = rows       ? in_block * dim + d
                     : is_value ? fp8_value_at(in_block, d)
                                : fp8_key_at(in_block, d);
      codes[at] = fp8_code(x[d], scale);
    }
    if (lane == 0) head.scales[(is_value ? kBlockTokens : 0) + in_block] = scale;
  }
}

// One CTA per row; its angles are for all heads.
template <class T>
__global__ void __launch_bounds__(kThreads)
    rope_append_kv_kernel(LayerCache cache, RopeParams op, const float2* angles, float* query, float* key,
                          const float* value) {
  extern __shared__ float2 cos_sin[];  // [half]: cos and sin, times magnitude
  const int64_t row = blockIdx.x;
  const int32_t position = cache.positions[row];
  for (int i = threadIdx.x; i < op.half; i += kThreads) cos_sin[i] = angles[row * op.half + i];
  __syncthreads();  // all angles are there before any is used

  const int dim = cache.head_dim;
  float* my_key = key + row * cache.kv_heads * dim;  // [kv_heads, dim]
  float* my_query = query + row * cache.heads * dim;
  for (int i = threadIdx.x; i < (cache.heads + cache.kv_heads) * op.half; i += kThreads) {
    const int head = i / op.half, pair = i % op.half;
    float* x = head < cache.heads ? my_query + head * dim : my_key + (head - cache.heads) * dim;
    rotate(op, pair, cos_sin[pair].x, cos_sin[pair].y, x);
  }
  __syncthreads();  // the whole key is rotated before any of it is copied

  const int32_t block = table_of_row(cache, row)[position / kBlockTokens];
  append(T{}, cache, block, position % kBlockTokens, my_key, value + row * cache.kv_heads * dim);
}

// Rotation alone: one CTA per row of x [rows, heads, dim], rows row_stride apart.
__global__ void __launch_bounds__(kThreads)
    rotary_kernel(RopeParams op, const int32_t* positions, int heads, int dim, float* x, int64_t row_stride) {
  extern __shared__ float2 cos_sin[];  // [half]: cos and sin, times magnitude
  const int64_t row = blockIdx.x;
  for (int i = threadIdx.x; i < op.half; i += kThreads) cos_sin[i] = cos_sin_at(op, positions[row], i);
  __syncthreads();  // all wait for the cos_sin
  for (int i = threadIdx.x; i < heads * op.half; i += kThreads) {
    const int head = i / op.half, pair = i % op.half;
    rotate(op, pair, cos_sin[pair].x, cos_sin[pair].y, x + row * row_stride + head * dim);
  }
}

__global__ void __launch_bounds__(kThreads)
    angles_kernel(const int32_t* positions, int64_t count, RopeParams op, float2* angles) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) angles[i] = cos_sin_at(op, positions[i / op.half], static_cast<int>(i % op.half));
}

__global__ void __launch_bounds__(kThreads)
    angles_on_axes_kernel(const int32_t* positions, const uint8_t* axes, int64_t count, RopeParams op,
                          float2* angles) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int pair = static_cast<int>(i % op.half), axis = axes != nullptr ? axes[pair] : 0;
  angles[i] = cos_sin_at(op, positions[i / op.half * 3 + axis], pair);
}

// In double, as the reference: a float's logarithm would be another step's at some positions.
__global__ void __launch_bounds__(kThreads)
    grow_queries_kernel(QueryGrowth op, const int32_t* positions, int64_t cols, float* query) {
  const int64_t row = blockIdx.x;
  const double position = static_cast<double>(positions[row]) + op.offset;
  const auto by = static_cast<float>(1.0 + op.scale * log1p(floor(position / static_cast<double>(op.every))));
  for (int64_t c = threadIdx.x; c < cols; c += kThreads) query[row * cols + c] *= by;
}

}  // namespace

void launch_grow_queries(const QueryGrowth& op, const int32_t* positions, int64_t rows, int64_t cols,
                         float* query, const Launch& at) {
  if (rows == 0) return;
  grow_queries_kernel<<<static_cast<unsigned>(rows), kThreads, 0, at.stream>>>(op, positions, cols, query);
  check_launch("grow_queries_kernel");
}

void launch_angles(const int32_t* positions, int64_t rows, const RopeParams& op, float2* angles,
                   const Launch& at) {
  const int64_t count = rows * op.half;
  if (count == 0) return;
  angles_kernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, at.stream>>>(
      positions, count, op, angles);
  check_launch("angles_kernel");
}

void launch_angles_on_axes(const int32_t* positions, const uint8_t* axes, int64_t rows, const RopeParams& op,
                           float2* angles, const Launch& at) {
  const int64_t count = rows * op.half;
  if (count == 0) return;
  angles_on_axes_kernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, at.stream>>>(
      positions, axes, count, op, angles);
  check_launch("angles_on_axes_kernel");
}

void launch_rotary(const RopeParams& op, const int32_t* positions, int64_t rows, int32_t heads,
                   int32_t head_dim, float* x, int64_t row_stride, const Launch& at) {
  if (rows == 0 || op.half == 0) return;
  const size_t shared_bytes = static_cast<size_t>(op.half) * sizeof(float2);
  rotary_kernel<<<static_cast<unsigned>(rows), kThreads, shared_bytes, at.stream>>>(op, positions, heads,
                                                                                    head_dim, x, row_stride);
  check_launch("rotary_kernel");
}

void launch_rope_append_kv(const LayerCache& cache, const RopeParams& op, const float2* angles, int64_t rows,
                           float* query, float* key, const float* value, const Launch& at) {
  if (rows == 0) return;
  const size_t shared_bytes = static_cast<size_t>(op.half) * sizeof(float2);
  with_cache_type(cache.type, [&](auto element) {
    rope_append_kv_kernel<decltype(element)>
        <<<static_cast<unsigned>(rows), kThreads, shared_bytes, at.stream>>>(cache, op, angles, query, key,
                                                                             value);
  });
  check_launch("rope_append_kv_kernel");
}

}  // namespace millrace::cuda
