// Attention over tensors, forward, on mma.sync: a CTA has 64 queries of a head, 16 a warp, and goes over
// tiles of keys with an online softmax. While scores of a tile are computed its values are on their way, and
// while its values are multiplied the next keys are (cp.async, from sm_80 on).
#include <cmath>

#include "kernels/cuda/attention/flash_mma.cuh"
#include "kernels/cuda/resources.h"

namespace millrace::cuda {
namespace flash_mma {
namespace {

// kCodesOf: q, k and v are E4M3 codes in memory, bf16 in shared memory; what codes are multiplied by is
// applied to scores and probabilities.
template <class ElementOf, int kDimOf, bool kCodesOf = false>
struct ForwardTile {
  using Element = ElementOf;
  static constexpr int kDim = kDimOf;
  static constexpr bool kCodes = kCodesOf;
  static constexpr int kQueries = 64, kThreads = 2 * kQueries;  // 16 queries a warp
  // 64 KB in all, what Turing has; of float32, whose products are written out, few.
  static constexpr int kKeys = sizeof(Element) == 4 ? 16 : kDim == 256 ? 32 : 64;
  static constexpr size_t kSharedBytes = sizeof(Element) * kDim * (kQueries + 2 * kKeys);
};

struct ForwardCall {
  Shape shape;
  Tensor q, k, v, out;
  float* lse;
  int32_t q_tiles;
};

template <class T>
struct RowState {
  float out[T::kDim / 8][4] = {};
  float row_max[2] = {-INFINITY, -INFINITY};  // rows g and g + 8, base 2
  float row_sum[2] = {};                      // of this lane's columns
};

// Of E4M3 codes: dot products times the scales of their rows.
template <class T>
__device__ inline void scale_scores(float (&p)[T::kKeys / 8][4], const float (&q_scale)[2], float k_scale) {
#pragma unroll
  for (int n = 0; n < T::kKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) p[n][i] *= q_scale[i / 2] * k_scale;
  }
}
// Probabilities times what the values' codes are multiplied by.
template <class T>
__device__ inline void scale_probabilities(float (&p)[T::kKeys / 8][4], float v_scale) {
#pragma unroll
  for (int n = 0; n < T::kKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) p[n][i] *= v_scale;
  }
}

// Dot products become probabilities under the new maximum; out is scaled to it.
template <class T>
__device__ inline void softmax_tile(const Shape& s, const SequenceRows& sequence, float (&p)[T::kKeys / 8][4],
                                    int32_t query, int32_t key, bool all_seen, RowState<T>& state) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = state.row_max[half];
#pragma unroll
    for (int n = 0; n < T::kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = p[n][2 * half + i];
        x = score_of(s, x);
        if (!all_seen && !sequence.sees(s, query + 8 * half, key + 8 * n + 2 * t + i)) x = -INFINITY;
        top = fmaxf(top, x);
      }
    }
    top = quad_max(top);
    const float base = top == -INFINITY ? 0.f : top;  // a row that has seen no key yet
    const float shrink = exp2f(state.row_max[half] - base);
    state.row_max[half] = top;
    float sum = state.row_sum[half] * shrink;
#pragma unroll
    for (int n = 0; n < T::kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = p[n][2 * half + i];
        x = exp2f(x - base);
        sum += x;
      }
    }
    state.row_sum[half] = sum;
#pragma unroll
    for (int n = 0; n < T::kDim / 8; ++n) {
      state.out[n][2 * half] *= shrink;
      state.out[n][2 * half + 1] *= shrink;
    }
  }
}

// Adds the sink, divides, writes out and lse of rows query and query + 8.
template <class T>
__device__ inline void write_rows(const ForwardCall& call, const SequenceRows& sequence, int32_t head,
                                  int32_t query, const RowState<T>& state) {
  using Element = typename T::Element;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = query + 8 * half;
    float sum = quad_sum(state.row_sum[half]), top = state.row_max[half], factor = 1.f;
    if (call.shape.sinks != nullptr) {
      const float sink = call.shape.sinks[head] * kLog2e;
      const float both = fmaxf(top, sink), base = both == -INFINITY ? 0.f : both;
      factor = exp2f(top - base);
      sum = sum * factor + exp2f(sink - base);
      top = both;
    }
    if (row >= sequence.q_len) continue;
    const float scale = sum > 0.f ? factor / sum : 0.f;
    if (call.lse != nullptr && t == 0) {
      call.lse[row_value_start(call.shape, sequence, head) + row] =
          sum > 0.f ? (top + log2f(sum)) * kLn2 : -INFINITY;
    }
    auto* out = query_row<Element>(call.out, sequence, head, row);
#pragma unroll
    for (int n = 0; n < T::kDim / 8; ++n) {
      if (8 * n >= call.shape.value_dim) continue;
      store_pair(out + 8 * n + 2 * t, state.out[n][2 * half] * scale, state.out[n][2 * half + 1] * scale);
    }
  }
}

// Grid: (tile of queries, head, sequence), the last tiles first: with a causal mask they have most keys.
template <class T>
__global__ void __launch_bounds__(T::kThreads)
    flash_forward_mma_kernel(const __grid_constant__ ForwardCall call) {
  using Element = typename T::Element;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto* q_tile = reinterpret_cast<Element*>(shared_bytes);
  Element* k_tile = q_tile + T::kQueries * T::kDim;
  Element* v_tile = k_tile + T::kKeys * T::kDim;
  const Shape& s = call.shape;
  const int32_t m = call.q_tiles - 1 - static_cast<int32_t>(blockIdx.x % call.q_tiles);
  const auto rest = static_cast<int32_t>(blockIdx.x / call.q_tiles);
  const int32_t head = rest % s.heads, kv_head = head / s.group, first_query = m * T::kQueries;
  const SequenceRows sequence(s, rest / s.heads);
  if (first_query >= sequence.q_len) return;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const int32_t query = first_query + 16 * warp + g;  // and + 8

  const auto* any = static_cast<const Element*>(call.q.data);
  const auto load_keys = [&](const Tensor& from, Element* tile, int32_t key, int32_t dim) {
    if constexpr (T::kCodes) {
      load_codes<T::kDim, T::kKeys, T::kThreads>(tile, key, sequence.k_len, dim, [&](int32_t row) {
        return key_row<const uint8_t>(s, from, sequence, kv_head, row);
      });
    } else {
      load_tile<T::kDim, T::kKeys, T::kThreads>(tile, key, sequence.k_len, dim, any, [&](int32_t row) {
        return key_row<const Element>(s, from, sequence, kv_head, row);
      });
    }
    ptx::copy_commit();
  };
  float q_scale[2] = {1.f, 1.f};
  const float *k_scales = nullptr, *v_scales = nullptr;
  if constexpr (T::kCodes) {
    load_codes<T::kDim, T::kQueries, T::kThreads>(
        q_tile, first_query, sequence.q_len, s.head_dim,
        [&](int32_t row) { return query_row<const uint8_t>(call.q, sequence, head, row); });
    const int64_t row_start = s.cu_q != nullptr ? sequence.q_start : int64_t{sequence.index} * s.max_q;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = query + 8 * half;
      if (row < sequence.q_len) q_scale[half] = s.q_scales[(row_start + row) * s.heads + head];
    }
    const int64_t blocks = (s.max_k + kKeysPerScale - 1) / kKeysPerScale;
    const int64_t scales = (int64_t{sequence.index} * s.kv_heads + kv_head) * blocks;
    k_scales = s.k_scales + scales, v_scales = s.v_scales + scales;
  } else {
    load_tile<T::kDim, T::kQueries, T::kThreads>(
        q_tile, first_query, sequence.q_len, s.head_dim, any,
        [&](int32_t row) { return query_row<const Element>(call.q, sequence, head, row); });
  }
  const KeyTiles<T::kKeys> tiles(s, sequence, head, first_query, T::kQueries);
  RowState<T> state;
  if (tiles.count > 0) load_keys(call.k, k_tile, tiles.key(s, 0), s.head_dim);
  for (int32_t tile = 0; tile < tiles.count; ++tile) {
    const int32_t key = tiles.key(s, tile);
    load_keys(call.v, v_tile, key, s.value_dim);
    ptx::copy_wait<1>();  // q and these keys; the values may be under way
    __syncthreads();      // everybody's part of them
    float p[T::kKeys / 8][4] = {};
    multiply_rows<T::kDim, T::kKeys>(p, q_tile, 16 * warp, k_tile);
    if constexpr (T::kCodes) scale_scores<T>(p, q_scale, k_scales[key / kKeysPerScale]);
    const bool all_seen = sequence.sees_all(s, first_query, T::kQueries, key, T::kKeys);
    softmax_tile<T>(s, sequence, p, query, key, all_seen, state);
    if constexpr (T::kCodes) scale_probabilities<T>(p, v_scales[key / kKeysPerScale]);
    ptx::copy_wait<0>();
    __syncthreads();  // the values are there; and nobody reads the keys any more
    if (tile + 1 < tiles.count) load_keys(call.k, k_tile, tiles.key(s, tile + 1), s.head_dim);
    multiply_columns<T::kDim, T::kKeys>(state.out, p, v_tile);
    __syncthreads();  // nobody reads the values any more
  }
  write_rows<T>(call, sequence, head, query, state);
}

template <class T>
void launch_tile(ForwardCall call, cudaStream_t stream) {
  call.q_tiles = (call.shape.max_q + T::kQueries - 1) / T::kQueries;
  const int64_t grid = int64_t{call.q_tiles} * call.shape.heads * call.shape.batch;
  if (T::kSharedBytes > 48 * 1024) {
    check_call(cudaFuncSetAttribute(flash_forward_mma_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(T::kSharedBytes)),
               "cudaFuncSetAttribute(flash_forward_mma)");
  }
  flash_forward_mma_kernel<T><<<static_cast<unsigned>(grid), T::kThreads, T::kSharedBytes, stream>>>(call);
  check_launch("flash_forward_mma");
}

template <class Element, bool kCodes = false>
void launch_type(const ForwardCall& call, cudaStream_t stream) {
  switch (padded_dim(call.shape.head_dim, call.shape.value_dim)) {
    case 64:
      return launch_tile<ForwardTile<Element, 64, kCodes>>(call, stream);
    case 128:
      return launch_tile<ForwardTile<Element, 128, kCodes>>(call, stream);
    default:
      return launch_tile<ForwardTile<Element, 256, kCodes>>(call, stream);
  }
}

}  // namespace
}  // namespace flash_mma

bool supports_flash_backward_mma(const mr_flash_problem& problem, int code_architecture) {
  return problem.type != MR_F8_E4M3 && supports_flash_mma(problem, code_architecture);
}
bool supports_flash_mma(const mr_flash_problem& problem, int code_architecture) {
  if (problem.type == MR_F16) return code_architecture >= 75;
  return code_architecture >= 80;
}

void launch_flash_forward_mma(const mr_flash_problem& problem, const mr_flash_tensor& q,
                              const mr_flash_tensor& k, const mr_flash_tensor& v, const mr_flash_tensor& out,
                              float* lse, cudaStream_t stream) {
  using namespace flash_mma;
  if (problem.batch == 0 || problem.max_q == 0) return;
  const Shape shape = shape_of(problem);
  const bool ragged_q = shape.cu_q != nullptr, ragged_k = shape.cu_k != nullptr;
  const ForwardCall call{shape,
                         tensor_of(q, ragged_q),
                         tensor_of(k, ragged_k),
                         tensor_of(v, ragged_k),
                         tensor_of(out, ragged_q),
                         lse,
                         0};
  if (problem.type == MR_F32) return launch_type<float>(call, stream);
  if (problem.type == MR_F8_E4M3) return launch_type<__nv_bfloat16, true>(call, stream);
  problem.type == MR_F16 ? launch_type<__half>(call, stream) : launch_type<__nv_bfloat16>(call, stream);
}

}  // namespace millrace::cuda
