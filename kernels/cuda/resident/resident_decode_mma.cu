// One decode step on tensor cores, from sm_75 on. A warp takes 16 keys at a time straight from global memory
// to the fragments of the products, without shared memory: sums over dimensions and the order of output
// columns may be permuted freely, so a lane's 16 contiguous bytes of a key or value row are its share of
// several products.
//   scores: lane (g, t) holds dimensions 32i + 8t .. + 8 of key g; pairs (4s, 4s + 1), (4s + 2, 4s + 3) of
//   them
//           are b0 and b1 of step (i, s), and the query fragments are loaded in the same order.
//   output: lane (g, t) holds dimensions 64c + 8g .. + 8 of keys 2t, 2t + 1, 2t + 8, 2t + 9; column g of the
//           product (c, j) is dimension 64c + 8g + j.
#include "kernels/cuda/ptx/mma_f16.cuh"
#include "kernels/cuda/resident/resident_decode.h"

namespace millrace::cuda::resident {
namespace {

template <int kDimOf, int kRowsOf>
struct Tile {
  static constexpr int kDim = kDimOf, kRows = kRowsOf;  // 64, 128, 256; 8 or 16 query heads
  // The warps' outputs meet in 32 KB of shared memory.
  static constexpr int kWarps = 8192 / (kRows * kDim) < 8 ? 8192 / (kRows * kDim) : 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSteps = kDim == 64 ? 2 : 1;        // 16 keys each, loaded together
  static constexpr int kStride = kWarps * kKeysPerStep;    // from one to the next: few keys occupy all warps
  static constexpr int kFloats = kRows * kDim / kThreads;  // of the output, a thread's share
};

template <class T>
struct Shared {
  float out[T::kWarps][T::kRows][T::kDim];  // later the splits' weights, [kRows][splits]
  float row_max[T::kWarps][T::kRows];
  float row_sum[T::kWarps][T::kRows];
  bool is_last;
};

__device__ inline uint32_t part(const uint4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}
__device__ inline uint32_t pack(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
// 16 bytes of a row, zeros where the row is not there: its probability is 0, and 0 times what lies there may
// be NaN.
__device__ inline uint4 load_row(const __half* row, bool there) {
  return there ? __ldg(reinterpret_cast<const uint4*>(row)) : uint4{0, 0, 0, 0};
}

// A warp's rows: lane (g, t) has rows g and, of 16, g + 8.
template <class T>
struct WarpState {
  static constexpr int kHalves = T::kRows / 8;
  float out[T::kDim / 8][4] = {};  // [8c + j]: row g of columns 2t, 2t + 1 of the product (c, j); row g + 8
  float row_max[kHalves];
  float row_sum[kHalves] = {};  // of this lane's keys
};

template <class T>
struct Queries {
  uint4 rows[T::kRows / 8][T::kDim / 32];
};

// Scores of 16 keys, base 2: [8 keys][row g columns 2t, 2t + 1; row g + 8].
template <class T>
__device__ inline void scores_of(const Queries<T>& q, const uint4 (&keys)[2][T::kDim / 32],
                                 float (&scores)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < T::kDim / 32; ++i) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t a[4] = {part(q.rows[0][i], 2 * s), 0, part(q.rows[0][i], 2 * s + 1), 0};
        if constexpr (T::kRows == 16) {
          a[1] = part(q.rows[1][i], 2 * s);
          a[3] = part(q.rows[1][i], 2 * s + 1);
        }
        ptx::mma_f16(scores[n], a, part(keys[n][i], 2 * s), part(keys[n][i], 2 * s + 1));
      }
    }
  }
}

// out += probabilities [rows, 16 keys] x values.
template <class T>
__device__ inline void add_values(const float (&p)[2][4], const uint4 (&values)[4][T::kDim / 64],
                                  float (&out)[T::kDim / 8][4]) {
  const uint32_t a[4] = {pack(p[0][0], p[0][1]), T::kRows == 16 ? pack(p[0][2], p[0][3]) : 0,
                         pack(p[1][0], p[1][1]), T::kRows == 16 ? pack(p[1][2], p[1][3]) : 0};
#pragma unroll
  for (int c = 0; c < T::kDim / 64; ++c) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const unsigned halves = j % 2 == 0 ? 0x5410 : 0x7632;
      const uint32_t b0 = __byte_perm(part(values[0][c], j / 2), part(values[1][c], j / 2), halves);
      const uint32_t b1 = __byte_perm(part(values[2][c], j / 2), part(values[3][c], j / 2), halves);
      ptx::mma_f16(out[8 * c + j], a, b0, b1);
    }
  }
}

// Masks keys from `left` on, and turns scores into probabilities under the new maximum.
template <class T>
__device__ inline void softmax_step(float (&scores)[T::kSteps][2][4], int left, float scale_log2,
                                    WarpState<T>& state) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < T::kRows / 8; ++half) {
    float top = state.row_max[half];
#pragma unroll
    for (int x = 0; x < T::kSteps * 4; ++x) {
      const int key = x / 4 * T::kStride + x / 2 % 2 * 8 + 2 * t + x % 2;
      float& score = scores[x / 4][x / 2 % 2][2 * half + x % 2];
      score = key < left ? score * scale_log2 : -INFINITY;
      top = fmaxf(top, score);
    }
    top = quad_max(top);
    // A row of -infinity alone (an input did) stays NaN-free here as in the definition's limit: weight 0.
    const float base = top == -INFINITY ? 0.f : top;
    const float shrink = exp2f(state.row_max[half] - base);
    state.row_max[half] = top;
    float sum = state.row_sum[half] * shrink;
#pragma unroll
    for (int x = 0; x < T::kSteps * 4; ++x) {
      float& score = scores[x / 4][x / 2 % 2][2 * half + x % 2];
      score = exp2f(score - base);
      sum += score;
    }
    state.row_sum[half] = sum;
#pragma unroll
    for (int d = 0; d < T::kDim / 8; ++d) {
      state.out[d][2 * half] *= shrink;
      state.out[d][2 * half + 1] *= shrink;
    }
  }
}

// Keys [first, end), 16 a warp in turn, kSteps of them at a time. k and v: of the KV head.
template <class T>
__device__ inline void attend(const Queries<T>& q, const __half* k, const __half* v, int first, int end,
                              float scale_log2, WarpState<T>& state) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_of_warp = first + static_cast<int>(threadIdx.x / 32) * kKeysPerStep;
  for (int key = first_of_warp; key < end; key += T::kStride * T::kSteps) {
    uint4 keys[T::kSteps][2][T::kDim / 32], values[T::kSteps][4][T::kDim / 64];
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int row = key + T::kStride * s + 8 * n + g;
#pragma unroll
        for (int i = 0; i < T::kDim / 32; ++i) {
          keys[s][n][i] = load_row(k + static_cast<int64_t>(row) * T::kDim + 32 * i + 8 * t, row < end);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int row = key + T::kStride * s + 2 * t + n / 2 * 8 + n % 2;
#pragma unroll
        for (int c = 0; c < T::kDim / 64; ++c) {
          values[s][n][c] = load_row(v + static_cast<int64_t>(row) * T::kDim + 64 * c + 8 * g, row < end);
        }
      }
    }
    float scores[T::kSteps][2][4] = {};
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) scores_of<T>(q, keys[s], scores[s]);
    softmax_step<T>(scores, end - key, scale_log2, state);
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) add_values<T>(scores[s], values[s], state.out);
  }
}

// The warps' outputs under the block's maximum; then a barrier. row_max and row_sum of all warps are there.
template <class T>
__device__ inline void share_outputs(const WarpState<T>& state, Shared<T>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < T::kRows / 8; ++half) {
    const float sum = quad_sum(state.row_sum[half]);
    if (t == 0) {
      shared.row_max[warp][g + 8 * half] = state.row_max[half];
      shared.row_sum[warp][g + 8 * half] = sum;
    }
  }
  __syncthreads();  // every warp's maximum before anybody's factor
#pragma unroll
  for (int half = 0; half < T::kRows / 8; ++half) {
    const int row = g + 8 * half;
    float top = -INFINITY;
    for (int w = 0; w < T::kWarps; ++w) top = fmaxf(top, shared.row_max[w][row]);
    const float factor = exp2f(state.row_max[half] - (top == -INFINITY ? 0.f : top));
#pragma unroll
    for (int c = 0; c < T::kDim / 64; ++c) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {  // 2t, 2t + 1: eight dimensions each
        float* to = &shared.out[warp][row][64 * c + 8 * (2 * t + column)];
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
  __syncthreads();  // outputs before the sums over warps
}

// x = this thread's share of the block's output: floats [kFloats * thread, ..) of [kRows][kDim].
template <class T>
__device__ inline void sum_warps(const Shared<T>& shared, float (&x)[T::kFloats]) {
  const float* from = &shared.out[0][0][0] + threadIdx.x * T::kFloats;
#pragma unroll
  for (int i = 0; i < T::kFloats; ++i) x[i] = 0;
#pragma unroll
  for (int w = 0; w < T::kWarps; ++w) {
#pragma unroll
    for (int i = 0; i < T::kFloats; ++i) x[i] += from[w * T::kRows * T::kDim + i];
  }
}

// Maximum and sum of a row over the block's warps.
template <class T>
__device__ inline float2 block_sum(const Shared<T>& shared, int row) {
  float top = -INFINITY, sum = 0;
  for (int w = 0; w < T::kWarps; ++w) top = fmaxf(top, shared.row_max[w][row]);
  for (int w = 0; w < T::kWarps; ++w) {
    sum += shared.row_sum[w][row] * exp2f(shared.row_max[w][row] - (top == -INFINITY ? 0.f : top));
  }
  return make_float2(top, sum);
}

template <class T>
__device__ inline void write_output(float* out, const float (&x)[T::kFloats], float scale, int row, int rows,
                                    int head_dim) {
  const int first = static_cast<int>(threadIdx.x) * T::kFloats % T::kDim;
  if (row >= rows) return;
#pragma unroll
  for (int i = 0; i < T::kFloats; ++i) {
    if (first + i < head_dim) out[static_cast<int64_t>(row) * head_dim + first + i] = x[i] * scale;
  }
}

// Adds weight x this thread's share of a split's output.
template <class T>
struct SplitShare {
  static constexpr int kWide = T::kFloats % 4 == 0 ? 4 : 2;
  float x[T::kFloats];

  __device__ void load(const float* from) {
#pragma unroll
    for (int i = 0; i < T::kFloats; i += kWide) {
      if constexpr (kWide == 4) {
        const float4 y = __ldcg(reinterpret_cast<const float4*>(from + i));
        x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
      } else {
        const float2 y = __ldcg(reinterpret_cast<const float2*>(from + i));
        x[i] = y.x, x[i + 1] = y.y;
      }
    }
  }
  __device__ void add_to(float (&sum)[T::kFloats], float weight) const {
#pragma unroll
    for (int i = 0; i < T::kFloats; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
  }
};

// The splits of a tile meet: one maximum for all, every split's output weighted by exp2(its maximum - that),
// by the block that took the last ticket. The order of the sum is that of the splits, whoever comes last.
template <class T>
__device__ inline void reduce_splits(const float* partial_out, const float2* partial_sum, int splits,
                                     Shared<T>& shared, float (&x)[T::kFloats], float* inverse_sum) {
  constexpr int kAhead = T::kFloats > 4 ? 2 : 16;  // splits whose outputs are under way at once
  static_assert(kMaxSplits <= 64, "two splits a lane");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float* from = partial_out + threadIdx.x * T::kFloats;
  SplitShare<T> ahead[kAhead];
#pragma unroll
  for (int s = 0; s < kAhead; ++s) {
    if (s < splits) ahead[s].load(from + s * T::kRows * T::kDim);
  }
  float* weights = &shared.out[0][0][0];  // [kRows][splits]
  float* inverse = &shared.row_sum[0][0];
  for (int row = warp; row < T::kRows; row += T::kWarps) {
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
      const float weight = exp2f(of[i].x - (top == -INFINITY ? 0.f : top));
      if (lane + 32 * i < splits) weights[row * splits + lane + 32 * i] = weight;
      sum += of[i].y * weight;
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) inverse[row] = 1.f / sum;
  }
  __syncthreads();  // weights before the weighted sum
  const int row = static_cast<int>(threadIdx.x) * T::kFloats / T::kDim;
#pragma unroll
  for (int i = 0; i < T::kFloats; ++i) x[i] = 0;
  for (int first = 0; first < splits; first += kAhead) {
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (first + s < splits) ahead[s].add_to(x, weights[row * splits + first + s]);
      const int next = first + kAhead + s;
      if (next < splits) ahead[s].load(from + next * T::kRows * T::kDim);
    }
  }
  *inverse_sum = inverse[row];
}

// Grid (tiles, splits). Tile: row tiles of a KV head beside one another.
template <class T>
__global__ void __launch_bounds__(T::kThreads)
    resident_decode_mma_kernel(DecodeCall call, SplitPlan plan, SplitWorkspace workspace, float scale_log2) {
  __shared__ Shared<T> shared;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row_tiles = call.shape.row_tiles(), group = call.shape.group();
  const int tile = blockIdx.x, kv_head = tile / row_tiles, first_row = tile % row_tiles * T::kRows;
  const int rows = min(T::kRows, group - first_row);
  const int64_t first_head = static_cast<int64_t>(kv_head) * group + first_row;
  const int split = blockIdx.y, splits = plan.splits;

  Queries<T> q;
#pragma unroll
  for (int half = 0; half < T::kRows / 8; ++half) {
    const int row = g + 8 * half;
#pragma unroll
    for (int i = 0; i < T::kDim / 32; ++i) {
      q.rows[half][i] = load_row(call.q + (first_head + row) * T::kDim + 32 * i + 8 * t, row < rows);
    }
  }
  WarpState<T> state;
#pragma unroll
  for (int half = 0; half < T::kRows / 8; ++half) state.row_max[half] = -INFINITY;
  const int64_t head_start = static_cast<int64_t>(kv_head) * call.shape.max_seq * T::kDim;
  const int first = split * plan.keys_per_split;
  attend<T>(q, call.k + head_start, call.v + head_start, first, min(call.keys, first + plan.keys_per_split),
            scale_log2, state);

  share_outputs<T>(state, shared);
  float x[T::kFloats];
  sum_warps<T>(shared, x);
  float* out = call.out + first_head * call.shape.head_dim;
  const int row = static_cast<int>(threadIdx.x) * T::kFloats / T::kDim;
  if (splits == 1) {
    write_output<T>(out, x, 1.f / block_sum<T>(shared, row).y, row, rows, call.shape.head_dim);
    return;
  }
  const int64_t tile_start = static_cast<int64_t>(tile) * splits;
  float* partial_out = workspace.partial_out + tile_start * T::kRows * T::kDim;
  float2* partial_sum = workspace.partial_sum + tile_start * T::kRows;
#pragma unroll
  for (int i = 0; i < T::kFloats; i += 2) {
    *reinterpret_cast<float2*>(partial_out + split * T::kRows * T::kDim + threadIdx.x * T::kFloats + i) =
        make_float2(x[i], x[i + 1]);
  }
  if (threadIdx.x < T::kRows) {
    partial_sum[split * T::kRows + threadIdx.x] = block_sum<T>(shared, threadIdx.x);
  }
  __syncthreads();  // all threads' results are out; and shared.out is read, its memory may be the weights'
  if (threadIdx.x == 0) {
    __threadfence();  // the block's results before its ticket, for whoever takes the last one
    shared.is_last = atomicAdd(&workspace.tickets[tile], 1u) == static_cast<uint32_t>(splits - 1);
    __threadfence();  // the others' results are read after their tickets
  }
  __syncthreads();  // who is last
  if (!shared.is_last) return;
  float inverse_sum;
  reduce_splits<T>(partial_out, partial_sum, splits, shared, x, &inverse_sum);
  write_output<T>(out, x, inverse_sum, row, rows, call.shape.head_dim);
  if (threadIdx.x == 0) workspace.tickets[tile] = 0;  // for the next launch
}

template <int kDim, int kRows>
cudaError_t launch(const DecodeCall& call, SplitPlan plan, const SplitWorkspace& workspace,
                   cudaStream_t stream) {
  using T = Tile<kDim, kRows>;
  static_assert(kMaxSplits <= T::kWarps * T::kDim, "the weights fit where the warps' outputs were");
  const float scale_log2 = 1.44269504f / sqrtf(static_cast<float>(call.shape.head_dim));
  const dim3 grid(static_cast<unsigned>(call.shape.tiles()), static_cast<unsigned>(plan.splits));
  resident_decode_mma_kernel<T><<<grid, T::kThreads, 0, stream>>>(call, plan, workspace, scale_log2);
  return cudaGetLastError();
}

template <int kRows>
cudaError_t launch_dim(const DecodeCall& call, SplitPlan plan, const SplitWorkspace& workspace,
                       cudaStream_t stream) {
  switch (call.shape.padded_dim()) {
    case 64:
      return launch<64, kRows>(call, plan, workspace, stream);
    case 128:
      return launch<128, kRows>(call, plan, workspace, stream);
    default:
      return launch<256, kRows>(call, plan, workspace, stream);
  }
}

}  // namespace

cudaError_t launch_decode_mma(const DecodeCall& call, SplitPlan plan, const SplitWorkspace& workspace,
                              cudaStream_t stream) {
  return call.shape.tile_rows() == 8 ? launch_dim<8>(call, plan, workspace, stream)
                                     : launch_dim<16>(call, plan, workspace, stream);
}

}  // namespace millrace::cuda::resident
