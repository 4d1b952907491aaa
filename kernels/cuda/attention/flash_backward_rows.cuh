// Before and after the backward kernel, row by row: D = rowsum(dO * O) and lse as it wants them, dQ as the
// caller wants it, the gradients of sinks.
#pragma once

#include "kernels/cuda/attention/flash_problem.cuh"

namespace millrace::cuda {

inline constexpr int kFlashRowLanes = 16, kFlashRowThreads = 256;

struct FlashRowsParams {
  FlashShape shape;
  int32_t value_dim, padded_rows;  // of a head of a sequence
  const void *out, *d_out;
  FlashStrides out_strides, d_out_strides;
  const float* lse;
  float *lse_log2, *delta;  // [batch, heads, padded_rows]
  // Of fixed point, or null: [batch, kv_heads, padded_dim + 1] and [batch, heads, padded_rows].
  const float* bounds;
  int32_t padded_dim;
  int8_t* row_exponents;
};

__device__ inline float flash_float(__half x) { return __half2float(x); }
__device__ inline float flash_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Fixed point. |dQ| of a row and column, before scale, is at most sum over keys of P |dP - D| times the
// column's largest |K|, and the sum at most twice the row's |dO| times the largest |V|: both rounded up to
// powers of two leave an int32 no way to overflow. What is not a finite number makes the factor, and so dQ,
// NaN.
inline constexpr int8_t kFlashNotFinite = -128;
__device__ inline int8_t flash_fixed_exponent(float bound) {
  const uint32_t exponent = __float_as_uint(bound) >> 23 & 0xff;
  if (exponent == 0xff) return kFlashNotFinite;
  return static_cast<int8_t>(15 - max(static_cast<int32_t>(exponent) - 126, -45));
}
__device__ inline float flash_fixed_factor(int8_t exponent) {
  return exponent == kFlashNotFinite ? NAN : __int_as_float((exponent + 127) << 23);
}

// Bounds of fixed point: of every column of K the largest magnitude, then the largest |V|^2 of a key. A CTA a
// sequence, KV head and kFlashBoundRows keys; 16 lanes a row. As bits, whose order has NaN last. They begin
// at 0.
inline constexpr int kFlashBoundRows = 256;
template <class Element>
__global__ void __launch_bounds__(kFlashRowThreads)
    flash_bounds_kernel(const FlashShape s, const void* k, const void* v, FlashStrides k_strides,
                        FlashStrides v_strides, int32_t dim, int32_t value_dim, int32_t chunks,
                        int32_t padded_dim, uint32_t* bounds) {
  const auto chunk = static_cast<int32_t>(blockIdx.x % static_cast<unsigned>(chunks)),
             rest = static_cast<int32_t>(blockIdx.x / static_cast<unsigned>(chunks)),
             head = rest % s.kv_heads, b = rest / s.kv_heads;
  const FlashSequence seq(s, b);
  const int32_t column = static_cast<int32_t>(threadIdx.x % kFlashRowLanes) * 8,
                past = min(seq.k_len, (chunk + 1) * kFlashBoundRows);
  uint32_t most[8] = {}, largest = 0;
  for (int32_t row = chunk * kFlashBoundRows + static_cast<int32_t>(threadIdx.x / kFlashRowLanes);
       row - static_cast<int32_t>(threadIdx.x / kFlashRowLanes) < past;
       row += kFlashRowThreads / kFlashRowLanes) {
    float sum = 0.0f;
    if (row < past && column < dim) {
      const uint4 x = *reinterpret_cast<const uint4*>(
          static_cast<const Element*>(k) + flash_row_at(k_strides, b, seq.k_start, row, head) + column);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float value = fabsf(flash_float(reinterpret_cast<const Element*>(&x)[i]));
        most[i] = max(most[i], __float_as_uint(value));
      }
    }
    if (row < past && column < value_dim) {
      const uint4 x = *reinterpret_cast<const uint4*>(
          static_cast<const Element*>(v) + flash_row_at(v_strides, b, seq.k_start, row, head) + column);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float value = flash_float(reinterpret_cast<const Element*>(&x)[i]);
        sum = fmaf(value, value, sum);
      }
    }
#pragma unroll
    for (int distance = kFlashRowLanes / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    largest = max(largest, __float_as_uint(fabsf(sum)));
  }
  uint32_t* to = bounds + int64_t{rest} * (padded_dim + 1);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (most[i] != 0) atomicMax(to + column + i, most[i]);
  }
  if (column == 0 && largest != 0) atomicMax(to + padded_dim, largest);
}
// Columns' factors, [batch * kv_heads][padded_dim]. A CTA a sequence and KV head, a thread a column.
static __global__ void flash_column_factors_kernel(const float* bounds, int32_t padded_dim, float* factors) {
  const int64_t at = blockIdx.x;
  factors[at * padded_dim + threadIdx.x] =
      flash_fixed_factor(flash_fixed_exponent(bounds[at * (padded_dim + 1) + threadIdx.x]));
}

// 16 lanes a row. Rows past a sequence's end get lse infinity, so that their probabilities are zeros; a row
// that sees nothing has no score that counts.
template <class Element>
__global__ void __launch_bounds__(kFlashRowThreads)
    flash_row_sums_kernel(const __grid_constant__ FlashRowsParams p) {
  const int64_t at = (int64_t{blockIdx.x} * kFlashRowThreads + threadIdx.x) / kFlashRowLanes;
  const FlashShape& s = p.shape;
  const int64_t head_at = at / p.padded_rows;
  const bool exists = head_at < int64_t{s.batch} * s.heads;
  const auto row = static_cast<int32_t>(at % p.padded_rows);
  const auto b = exists ? static_cast<int32_t>(head_at / s.heads) : 0,
             head = static_cast<int32_t>(head_at % s.heads);
  const FlashSequence seq(s, b);
  const bool mine = exists && row < seq.q_len;
  float sum = 0.0f, square = 0.0f;
  const int32_t column = static_cast<int32_t>(threadIdx.x % kFlashRowLanes) * 8;
  if (mine && column < p.value_dim) {
    const uint4 x = *reinterpret_cast<const uint4*>(
        static_cast<const Element*>(p.out) + flash_row_at(p.out_strides, b, seq.q_start, row, head) + column);
    const uint4 y =
        *reinterpret_cast<const uint4*>(static_cast<const Element*>(p.d_out) +
                                        flash_row_at(p.d_out_strides, b, seq.q_start, row, head) + column);
    const auto* a = reinterpret_cast<const Element*>(&x);
    const auto* c = reinterpret_cast<const Element*>(&y);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum = fmaf(flash_float(a[i]), flash_float(c[i]), sum);
      square = fmaf(flash_float(c[i]), flash_float(c[i]), square);
    }
  }
#pragma unroll
  for (int distance = kFlashRowLanes / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
    square += __shfl_xor_sync(kAllLanes, square, distance);
  }
  if (!exists || threadIdx.x % kFlashRowLanes != 0) return;
  const float lse = mine ? p.lse[flash_lse_at(s, b, seq.q_start, head) + row] : INFINITY;
  p.lse_log2[at] = lse == -INFINITY ? 0.0f : lse * kFlashLog2e;
  p.delta[at] = sum;
  if (p.row_exponents != nullptr) {
    const float value =
        p.bounds[(int64_t{b} * s.kv_heads + head / s.group) * (p.padded_dim + 1) + p.padded_dim];
    p.row_exponents[at] = flash_fixed_exponent(2.0f * sqrtf(value) * sqrtf(square));
  }
}

// A CTA a tile: dQ out of the order of fragments, times scale; of fixed point over the factors. C: of the
// backward kernel.
template <class C>
__global__ void __launch_bounds__(2 * ptx::kWarpgroupThreads)
    flash_dq_kernel(const FlashShape s, const float* dq, int32_t tiles, void* out, FlashStrides strides,
                    int32_t dim, const int8_t* row_exponents, const float* column_factors) {
  using Element = typename C::Element;
  const int64_t head_at = blockIdx.x / static_cast<unsigned>(tiles);
  const auto tile = static_cast<int32_t>(blockIdx.x % static_cast<unsigned>(tiles));
  const auto b = static_cast<int32_t>(head_at / s.heads), head = static_cast<int32_t>(head_at % s.heads);
  const FlashSequence seq(s, b);
  if (tile * C::kQueries >= seq.q_len) return;
  const int warpgroup = static_cast<int>(threadIdx.x / ptx::kWarpgroupThreads);
  const int thread = static_cast<int>(threadIdx.x % ptx::kWarpgroupThreads), t = thread % 4;
  const auto* from = reinterpret_cast<const float4*>(dq + int64_t{blockIdx.x} * C::kDqFloats) +
                     warpgroup * (C::kDqFloats / 8) + thread;
  constexpr bool kByColumns = C::kQueries == 64;
  const int32_t first_row = tile * C::kQueries + (kByColumns ? 0 : warpgroup * 64) +
                            thread / kWarpLanes * 16 + thread % kWarpLanes / 4;
#pragma unroll
  for (int i = 0; i < C::kDqColumns / 32; ++i) {
    uint32_t words[2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float4 x = from[(4 * i + j) * ptx::kWarpgroupThreads];
      if (C::kSparse && row_exponents != nullptr) {
        const int8_t* rows =
            row_exponents + int64_t{blockIdx.x} * C::kQueries + (first_row - tile * C::kQueries);
        const float first = flash_fixed_factor(rows[0]), second = flash_fixed_factor(rows[8]);
        const float* columns = column_factors + (int64_t{b} * s.kv_heads + head / s.group) * C::kDim +
                               (kByColumns ? warpgroup * C::kDqColumns : 0) + 8 * (4 * i + j) + 2 * t;
        x.x = static_cast<float>(__float_as_int(x.x)) / (first * columns[0]);
        x.y = static_cast<float>(__float_as_int(x.y)) / (first * columns[1]);
        x.z = static_cast<float>(__float_as_int(x.z)) / (second * columns[0]);
        x.w = static_cast<float>(__float_as_int(x.w)) / (second * columns[1]);
      }
      words[0][j] = flash_pack<Element>(x.x * s.scale, x.y * s.scale);
      words[1][j] = flash_pack<Element>(x.z * s.scale, x.w * s.scale);
    }
    const int32_t column = (kByColumns ? warpgroup * C::kDqColumns : 0) + 32 * i + 8 * t;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      flash_quad_transpose(words[r]);
      const int32_t row = first_row + 8 * r;
      if (row >= seq.q_len || column >= dim) continue;
      *reinterpret_cast<uint4*>(static_cast<Element*>(out) +
                                flash_row_at(strides, b, seq.q_start, row, head) + column) =
          uint4{words[r][0], words[r][1], words[r][2], words[r][3]};
    }
  }
}

// dSink = - sum over rows of exp(sink - lse) D, a CTA a head, every thread and then all of them in a fixed
// order.
static __global__ void __launch_bounds__(kFlashRowThreads)
    flash_dsinks_kernel(const FlashShape s, const float* lse_log2, const float* delta, int32_t padded_rows,
                        float* d_sinks) {
  __shared__ float partial[kFlashRowThreads / kWarpLanes];
  const auto head = static_cast<int32_t>(blockIdx.x);
  const float sink = s.sinks[head] * kFlashLog2e;
  float sum = 0.0f;
  for (int32_t b = 0; b < s.batch; ++b) {
    const int64_t at = (int64_t{b} * s.heads + head) * padded_rows;
    for (auto row = static_cast<int32_t>(threadIdx.x); row < padded_rows; row += kFlashRowThreads) {
      sum = fmaf(-ptx::exp2_approx(sink - lse_log2[at + row]), delta[at + row], sum);
    }
  }
  const float all = block_sum<kFlashRowThreads>(sum, partial);
  if (threadIdx.x == 0) d_sinks[head] = all;
}

}  // namespace millrace::cuda
