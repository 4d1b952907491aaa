// How outputs of a tile's warps, and of its splits, become one: each is relative to a maximum of its own, so
// all are weighted by exp2(that maximum - the largest) and divided by the sum of the weighted sums. Warps
// are added up in shared memory; splits in global memory, where who takes the last ticket adds them all, or,
// as a cluster (sm_90 on), in each other's shared memory. Every sum is in the order of warps and splits,
// whoever comes last.
#pragma once

#include <cooperative_groups.h>

#include "kernels/cuda/resident/resident_decode.h"

namespace millrace::cuda::resident {

template <int kDimOf, int kRowsOf>
struct Tile {
  static constexpr int kDim = kDimOf, kRows = kRowsOf;  // 64, 128, 256; 8 or 16 query heads
  static constexpr int kOutputs = kRows * kDim;
  // The warps' outputs are added up in 32 KB of shared memory. Fewer are launched where there are few keys.
  static constexpr int kWarps = 8192 / kOutputs < 8 ? 8192 / kOutputs : 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSteps = kDim == 64 ? 2 : 1;  // 16 keys each, loaded together
  static constexpr int kVector =
      kOutputs / kThreads < 4 ? kOutputs / kThreads : 4;  // outputs of a thread at a time
};

template <class T>
struct Shared {
  alignas(
      16) float out[T::kWarps][T::kOutputs];  // [kRows][kDim] each; later the block's, or the splits' weights
  float row_max[T::kWarps][T::kRows];
  float row_sum[T::kWarps][T::kRows];  // relative to the block's maximum
  float2 total[T::kRows];              // the block's maximum and sum
  bool is_last;
};

// A warp's rows: lane (g, t) has rows g and, of 16, g + 8.
template <class T>
struct WarpState {
  static constexpr int kHalves = T::kRows / 8;
  float out[T::kDim / 8][4] = {};  // [8c + j]: row g of columns 2t, 2t + 1 of the product (c, j); row g + 8
  float row_max[kHalves];
  float row_sum[kHalves] = {};  // of this lane's keys
};

struct OutputRows {
  float* data;  // [rows, head_dim]
  int rows, head_dim;
};

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
// exp2(x - top), also where nothing has a score above -infinity.
__device__ inline float weight_of(float x, float top) { return exp2f(x - (top == -INFINITY ? 0.f : top)); }

// kVector outputs side by side in a row.
template <class T>
struct OutputVector {
  float x[T::kVector];

  template <class Load>
  __device__ static OutputVector load(const float* from, const Load& load_as) {
    OutputVector y;
    if constexpr (T::kVector == 4) {
      const float4 z = load_as(reinterpret_cast<const float4*>(from));
      y.x[0] = z.x, y.x[1] = z.y, y.x[2] = z.z, y.x[3] = z.w;
    } else {
      const float2 z = load_as(reinterpret_cast<const float2*>(from));
      y.x[0] = z.x, y.x[1] = z.y;
    }
    return y;
  }
  __device__ void store(float* to) const {
    if constexpr (T::kVector == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
      *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
    }
  }
  __device__ void add(const OutputVector& y, float weight) {
#pragma unroll
    for (int i = 0; i < T::kVector; ++i) x[i] = fmaf(weight, y.x[i], x[i]);
  }
};

template <class T>
__device__ inline void write_output(const OutputRows& out, int at, const OutputVector<T>& y, float scale) {
  const int row = at / T::kDim, d = at % T::kDim;
  if (row >= out.rows) return;
#pragma unroll
  for (int i = 0; i < T::kVector; ++i) {
    if (d + i < out.head_dim) out.data[static_cast<int64_t>(row) * out.head_dim + d + i] = y.x[i] * scale;
  }
}

// The warps' outputs, sums and maximum under the block's maximum; then a barrier.
template <class T>
__device__ inline void store_outputs(const WarpState<T>& state, Shared<T>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warps = blockDim.x / 32;
#pragma unroll
  for (int half = 0; half < T::kRows / 8; ++half) {
    if (t == 0) shared.row_max[warp][g + 8 * half] = state.row_max[half];
  }
  __syncthreads();  // every warp's maximum before anybody's factor
#pragma unroll
  for (int half = 0; half < T::kRows / 8; ++half) {
    const int row = g + 8 * half;
    float top = -INFINITY;
    for (int w = 0; w < warps; ++w) top = fmaxf(top, shared.row_max[w][row]);
    const float factor = weight_of(state.row_max[half], top), sum = quad_sum(state.row_sum[half]) * factor;
    if (t == 0) {
      shared.row_sum[warp][row] = sum;
      if (warp == 0) shared.total[row].x = top;
    }
#pragma unroll
    for (int c = 0; c < T::kDim / 64; ++c) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {  // 2t, 2t + 1: eight dimensions each
        float* to = &shared.out[warp][row * T::kDim + 64 * c + 8 * (2 * t + column)];
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          const int at = 2 * half + column;
          *reinterpret_cast<float4*>(to + j) =
              make_float4(state.out[8 * c + j][at] * factor, state.out[8 * c + j + 1][at] * factor,
                          state.out[8 * c + j + 2][at] * factor, state.out[8 * c + j + 3][at] * factor);
        }
      }
    }
  }
  __syncthreads();  // outputs and sums before they are added over warps
}

template <class T>
__device__ inline OutputVector<T> sum_warps(const Shared<T>& shared, int at) {
  OutputVector<T> sum{};
  for (int w = 0; w < static_cast<int>(blockDim.x / 32); ++w) {
    sum.add(OutputVector<T>::load(&shared.out[w][at], [](const auto* p) { return *p; }), 1.f);
  }
  return sum;
}
template <class T>
__device__ inline float sum_row(const Shared<T>& shared, int row) {
  float sum = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x / 32); ++w) sum += shared.row_sum[w][row];
  return sum;
}

// A block alone.
template <class T>
__device__ inline void write_block(const Shared<T>& shared, const OutputRows& out) {
  for (int at = threadIdx.x * T::kVector; at < T::kOutputs; at += blockDim.x * T::kVector) {
    write_output<T>(out, at, sum_warps<T>(shared, at), 1.f / sum_row<T>(shared, at / T::kDim));
  }
}

// weights [kRows][splits] and 1 / sum of every row, from the splits' maxima and sums.
template <class T>
__device__ inline void weigh_splits(const float2* partial_sum, int splits, float* weights, float* inverse) {
  static_assert(kMaxSplits <= 64, "two splits a lane");
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < T::kRows; row += blockDim.x / 32) {
    float2 of[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int s = lane + 32 * i;
      of[i] = s < splits ? __ldcg(&partial_sum[s * T::kRows + row]) : make_float2(-INFINITY, 0.f);
    }
    float top = fmaxf(of[0].x, of[1].x), sum = 0;
    for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float weight = weight_of(of[i].x, top);
      if (lane + 32 * i < splits) weights[row * splits + lane + 32 * i] = weight;
      sum += of[i].y * weight;
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) inverse[row] = 1.f / sum;
  }
}

// The block that took the last ticket, over all splits' results.
template <class T>
__device__ inline void add_splits(const float* partial_out, const float2* partial_sum, int splits,
                                  Shared<T>& shared, const OutputRows& out) {
  constexpr int kAhead = 16;  // splits whose outputs are under way at once, the first of them beside the sums
  static_assert(kMaxSplits <= T::kWarps * T::kDim, "the weights fit where the warps' outputs were");
  const auto load = [&](int split, int at) {
    return OutputVector<T>::load(partial_out + split * T::kOutputs + at,
                                 [](const auto* p) { return __ldcg(p); });
  };
  int at = threadIdx.x * T::kVector;
  OutputVector<T> ahead[kAhead];
#pragma unroll
  for (int s = 0; s < kAhead; ++s) {
    if (s < splits) ahead[s] = load(s, at);
  }
  float* weights = &shared.out[0][0];
  float* inverse = &shared.row_sum[0][0];
  weigh_splits<T>(partial_sum, splits, weights, inverse);
  __syncthreads();  // weights before the weighted sum
  while (at < T::kOutputs) {
    const int row = at / T::kDim;
    OutputVector<T> sum{};
    for (int first = 0; first < splits; first += kAhead) {
#pragma unroll
      for (int s = 0; s < kAhead; ++s) {
        if (first + s < splits) sum.add(ahead[s], weights[row * splits + first + s]);
        if (first + kAhead + s < splits) ahead[s] = load(first + kAhead + s, at);
      }
    }
    write_output<T>(out, at, sum, inverse[row]);
    at += blockDim.x * T::kVector;
    if (at >= T::kOutputs) return;
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (s < splits) ahead[s] = load(s, at);
    }
  }
}

template <class T>
__device__ inline void reduce_by_ticket(const ResidentWorkspace& workspace, int tile, int split, int splits,
                                        Shared<T>& shared, const OutputRows& out) {
  const int64_t tile_start = static_cast<int64_t>(tile) * splits;
  float* partial_out = workspace.partial_out + tile_start * T::kOutputs;
  float2* partial_sum = workspace.partial_sum + tile_start * T::kRows;
  for (int at = threadIdx.x * T::kVector; at < T::kOutputs; at += blockDim.x * T::kVector) {
    sum_warps<T>(shared, at).store(partial_out + split * T::kOutputs + at);
  }
  if (threadIdx.x < T::kRows) {
    partial_sum[split * T::kRows + threadIdx.x] =
        make_float2(shared.total[threadIdx.x].x, sum_row<T>(shared, threadIdx.x));
  }
  __syncthreads();  // all threads' results are out; and shared.out is read, its memory may be the weights'
  if (threadIdx.x == 0) {
    __threadfence();  // the block's results before its ticket, for whoever takes the last one
    shared.is_last = atomicAdd(&workspace.tickets[tile], 1u) == static_cast<uint32_t>(splits - 1);
    __threadfence();  // the others' results are read after their tickets
  }
  __syncthreads();  // who is last
  if (!shared.is_last) return;
  add_splits<T>(partial_out, partial_sum, splits, shared, out);
  if (threadIdx.x == 0) workspace.tickets[tile] = 0;  // for the next launch
}

// The splits of a tile are a cluster, rank by rank: each block adds its part of the outputs from all.
template <class T>
__device__ inline void reduce_cluster(int splits, Shared<T>& shared, const OutputRows& out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  for (int at = threadIdx.x * T::kVector; at < T::kOutputs; at += blockDim.x * T::kVector) {
    sum_warps<T>(shared, at).store(&shared.out[0][at]);  // nobody else reads these
  }
  if (threadIdx.x < T::kRows) shared.total[threadIdx.x].y = sum_row<T>(shared, threadIdx.x);
  cluster.sync();  // every block's results are in its shared memory
  const int threads = static_cast<int>(blockDim.x);
  const int first =
      (static_cast<int>(cluster.block_rank()) * threads + static_cast<int>(threadIdx.x)) * T::kVector;
  for (int at = first; at < T::kOutputs; at += splits * threads * T::kVector) {
    float2 of[kMaxCluster];
    OutputVector<T> outputs[kMaxCluster];
#pragma unroll
    for (int s = 0; s < kMaxCluster; ++s) {
      if (s >= splits) continue;
      of[s] = *cluster.map_shared_rank(&shared.total[at / T::kDim], s);
      outputs[s] = OutputVector<T>::load(cluster.map_shared_rank(&shared.out[0][at], s),
                                         [](const auto* p) { return *p; });
    }
    float top = -INFINITY, total = 0;
#pragma unroll
    for (int s = 0; s < kMaxCluster; ++s) {
      if (s < splits) top = fmaxf(top, of[s].x);
    }
    OutputVector<T> sum{};
#pragma unroll
    for (int s = 0; s < kMaxCluster; ++s) {
      if (s >= splits) continue;
      const float weight = weight_of(of[s].x, top);
      total = fmaf(of[s].y, weight, total);
      sum.add(outputs[s], weight);
    }
    write_output<T>(out, at, sum, 1.f / total);
  }
  cluster.sync();  // nobody's shared memory goes while another reads it
#endif
}

}  // namespace millrace::cuda::resident
