// Attention over tensors, backward, on mma.sync: every sum in a fixed order, without atomic additions.
//   delta[i] = sum_d d_out[i, d] out[i, d]                       flash_delta_kernel, a warp a row
//   p = exp(s - lse), ds = p (d_out v^T - delta) ds/dx           computed anew in both of the next
//   d_v = p^T d_out, d_k = scale ds^T q                          a CTA a tile of keys; over the group's
//                                                                heads and their queries, in order
//   d_q = scale ds k                                             a CTA a tile of queries; over keys, in order
//   d_sink[h] = -sum_i exp(sink - lse[i]) delta[i]               a CTA a head
// Tiles of keys have transposed scores, so that p^T and ds^T are fragments of the next product as they are.
#include "kernels/cuda/attention/flash_mma.cuh"
#include "kernels/cuda/resources.h"

namespace millrace::cuda {
namespace flash_mma {
namespace {

struct BackwardCall {
  Shape shape;
  Tensor q, k, v, out, d_out, d_q, d_k, d_v;
  const float* lse;
  float* delta;  // as lse
  float* d_sinks;
  int32_t tiles;  // of keys or of queries, of the longest sequence
};

// Which of the gradients of a tile of keys: registers do not hold both for 256 dimensions.
enum class KeyGradient { kBoth, kKeys, kValues };

template <class ElementOf, int kDimOf, KeyGradient kGradientOf>
struct KeyTile {
  using Element = ElementOf;
  static constexpr int kDim = kDimOf;
  static constexpr KeyGradient kGradient = kGradientOf;
  static constexpr bool kOfKeys = kGradient != KeyGradient::kValues,
                        kOfValues = kGradient != KeyGradient::kKeys;
  static constexpr int kKeys = kDim == 256 ? 32 : 64, kThreads = 2 * kKeys;  // 16 keys a warp
  static constexpr int kQueries = sizeof(Element) == 4 ? 16
                                  : kDim == 64         ? 64
                                  : kDim == 128        ? 32
                                                       : 16;  // at a time
  static constexpr size_t kSharedBytes = sizeof(Element) * kDim * 2 * (kKeys + kQueries);
};

template <class ElementOf, int kDimOf>
struct QueryTile {
  using Element = ElementOf;
  static constexpr int kDim = kDimOf;
  static constexpr int kQueries = kDim == 256 ? 32 : 64, kThreads = 2 * kQueries;  // 16 queries a warp
  static constexpr int kKeys = sizeof(Element) == 4 ? 16 : kDim == 64 ? 64 : 32;   // at a time
  static constexpr size_t kSharedBytes = sizeof(Element) * kDim * 2 * (kKeys + kQueries);
};

constexpr int kDeltaWarps = 8, kSinkThreads = 256;

__device__ inline float as_float(float x) { return x; }
__device__ inline float as_float(__half x) { return __half2float(x); }
__device__ inline float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Grid: eight rows of (sequence, head, query) each.
template <class Element>
__global__ void __launch_bounds__(kDeltaWarps * 32)
    flash_delta_kernel(const __grid_constant__ BackwardCall call) {
  const Shape& s = call.shape;
  const int64_t index = int64_t{blockIdx.x} * kDeltaWarps + threadIdx.x / 32;
  const auto row = static_cast<int32_t>(index % s.max_q);
  const auto head = static_cast<int32_t>(index / s.max_q % s.heads);
  const int64_t b = index / s.max_q / s.heads;
  if (b >= s.batch) return;
  const SequenceRows sequence(s, static_cast<int32_t>(b));
  if (row >= sequence.q_len) return;
  const auto* out = query_row<const Element>(call.out, sequence, head, row);
  const auto* d_out = query_row<const Element>(call.d_out, sequence, head, row);
  float sum = 0;
  for (int d = threadIdx.x % 32; d < s.value_dim; d += 32)
    sum = fmaf(as_float(out[d]), as_float(d_out[d]), sum);
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (threadIdx.x % 32 == 0) call.delta[row_value_start(s, sequence, head) + row] = sum;
}

__global__ void __launch_bounds__(kSinkThreads)
    flash_sink_gradient_kernel(const __grid_constant__ BackwardCall call) {
  const Shape& s = call.shape;
  const auto head = static_cast<int32_t>(blockIdx.x);
  const float sink = s.sinks[head];
  __shared__ float shared[kSinkThreads];
  float sum = 0;
  for (int32_t b = 0; b < s.batch; ++b) {
    const SequenceRows sequence(s, b);
    const int64_t start = row_value_start(s, sequence, head);
    for (int32_t row = threadIdx.x; row < sequence.q_len; row += kSinkThreads) {
      sum = fmaf(exp2f((sink - call.lse[start + row]) * kLog2e), call.delta[start + row], sum);
    }
  }
  shared[threadIdx.x] = sum;
  for (int half = kSinkThreads / 2; half > 0; half /= 2) {
    __syncthreads();  // the sums of the round before
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  if (threadIdx.x == 0) call.d_sinks[head] = -shared[0];
}

// Which blocks of queries have a block of keys in their lists; of 1,024 of them at a time, a bit each.
struct QueryBlocks {
  static constexpr int kBlocks = 1024;
  uint32_t bits[kBlocks / 32];
};

__device__ inline bool list_has(const Shape& s, int64_t n, int32_t column) {
  int32_t low = s.row_starts[n], high = s.row_starts[n + 1];
  const int32_t end = high;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (s.columns[middle] < column) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < end && s.columns[low] == column;
}
// Barriers before and after: nobody reads the bits of before, everybody sees the new ones.
template <int kThreads>
__device__ inline void find_query_blocks(const Shape& s, const SequenceRows& sequence, int32_t head,
                                         int32_t column, int32_t first, QueryBlocks& blocks) {
  __syncthreads();
  for (int i = threadIdx.x; i < QueryBlocks::kBlocks; i += kThreads) {
    const int32_t m = first + i;
    const int64_t n = (int64_t{sequence.index} * s.heads + head) * s.q_blocks + m;
    const uint32_t word = __ballot_sync(~0u, m < s.q_blocks && list_has(s, n, column));
    if (threadIdx.x % 32 == 0) blocks.bits[i / 32] = word;
  }
  __syncthreads();
}

template <class T>
struct KeyTileMemory {  // tiles lie in dynamic memory
  typename T::Element *k, *v, *q, *d_out;
};

// p^T and ds^T of a tile: rows are keys (key and key + 8), columns queries.
template <class T>
__device__ inline void key_tile_scores(const Shape& s, const SequenceRows& sequence,
                                       const KeyTileMemory<T>& tile, const float* lse, const float* delta,
                                       int32_t first_key, int32_t first_query, float (&p)[T::kQueries / 8][4],
                                       float (&ds)[T::kQueries / 8][4]) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  multiply_rows<T::kDim, T::kQueries>(p, tile.k, 16 * warp, tile.q);
  if constexpr (T::kOfKeys) multiply_rows<T::kDim, T::kQueries>(ds, tile.v, 16 * warp, tile.d_out);
  const bool all_seen = sequence.sees_all(s, first_query, T::kQueries, first_key, T::kKeys);
#pragma unroll
  for (int n = 0; n < T::kQueries / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 8 * n + 2 * t + i % 2;
      const float score = score_of(s, p[n][i]);
      const bool seen =
          all_seen || sequence.sees(s, first_query + column, first_key + 16 * warp + g + i / 2 * 8);
      p[n][i] = seen ? exp2f(score - lse[column]) : 0.f;
      if constexpr (T::kOfKeys) ds[n][i] = p[n][i] * (ds[n][i] - delta[column]) * slope_of(s, score);
    }
  }
}

// Rows first_row and first_row + 8 of a gradient, of dim elements.
template <int kDim, class Element, class RowAt>
__device__ inline void write_gradient(const float (&x)[kDim / 8][4], float scale, int32_t first_row,
                                      int32_t count, int32_t dim, const RowAt& row_at) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = first_row + 8 * half;
    if (row >= count) continue;
    Element* to = row_at(row);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      if (8 * n >= dim) continue;
      store_pair(to + 8 * n + 2 * t, x[n][2 * half] * scale, x[n][2 * half + 1] * scale);
    }
  }
}

// Grid: (tile of keys, KV head, sequence).
template <class T>
__global__ void __launch_bounds__(T::kThreads)
    flash_key_gradient_mma_kernel(const __grid_constant__ BackwardCall call) {
  using Element = typename T::Element;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  __shared__ float lse[T::kQueries], delta[T::kQueries];
  __shared__ QueryBlocks blocks;
  auto* k_tile = reinterpret_cast<Element*>(shared_bytes);
  Element* v_tile = k_tile + T::kKeys * T::kDim;
  Element* q_tile = v_tile + T::kKeys * T::kDim;
  const KeyTileMemory<T> tile{k_tile, v_tile, q_tile, q_tile + T::kQueries * T::kDim};
  const Shape& s = call.shape;
  const int32_t first_key = static_cast<int32_t>(blockIdx.x % call.tiles) * T::kKeys;
  const auto rest = static_cast<int32_t>(blockIdx.x / call.tiles);
  const int32_t kv_head = rest % s.kv_heads;
  const SequenceRows sequence(s, rest / s.kv_heads);
  if (first_key >= sequence.k_len) return;
  const auto* any = static_cast<const Element*>(call.k.data);
  const auto load_keys = [&](const Tensor& from, Element* to, int32_t dim) {
    load_tile<T::kDim, T::kKeys, T::kThreads>(to, first_key, sequence.k_len, dim, any, [&](int32_t row) {
      return key_row<const Element>(s, from, sequence, kv_head, row);
    });
  };
  load_keys(call.k, tile.k, s.head_dim);
  if constexpr (T::kOfKeys) load_keys(call.v, tile.v, s.value_dim);

  float d_k[T::kDim / 8][4] = {}, d_v[T::kDim / 8][4] = {};
  const int32_t past_key = min(first_key + T::kKeys, sequence.k_len);
  const int32_t first_tile = sequence.first_query(s, first_key) / T::kQueries;
  const int32_t past_tile = (sequence.past_query(s, past_key) + T::kQueries - 1) / T::kQueries;
  for (int32_t head = kv_head * s.group; head < (kv_head + 1) * s.group; ++head) {
    const int64_t values = row_value_start(s, sequence, head);
    int32_t found = -1;  // which 1,024 blocks of queries `blocks` is about
    for (int32_t m = first_tile; m < past_tile; ++m) {
      const int32_t first_query = m * T::kQueries;
      if (s.row_starts != nullptr) {
        const int32_t block = first_query / s.block_q;
        if (block / QueryBlocks::kBlocks != found) {
          found = block / QueryBlocks::kBlocks;
          find_query_blocks<T::kThreads>(s, sequence, head, first_key / s.block_k,
                                         found * QueryBlocks::kBlocks, blocks);
        }
        const int32_t bit = block % QueryBlocks::kBlocks;
        if ((blocks.bits[bit / 32] >> (bit % 32) & 1u) == 0) continue;
      }
      __syncthreads();  // nobody reads the queries of before
      const auto load_queries = [&](const Tensor& from, Element* to, int32_t dim) {
        load_tile<T::kDim, T::kQueries, T::kThreads>(
            to, first_query, sequence.q_len, dim, any,
            [&](int32_t row) { return query_row<const Element>(from, sequence, head, row); });
      };
      load_queries(call.q, tile.q, s.head_dim);
      load_queries(call.d_out, tile.d_out, s.value_dim);
      ptx::copy_commit();
      for (int i = threadIdx.x; i < T::kQueries; i += T::kThreads) {
        const bool there = first_query + i < sequence.q_len;
        lse[i] = there ? call.lse[values + first_query + i] * kLog2e : 0.f;
        delta[i] = there ? call.delta[values + first_query + i] : 0.f;
      }
      ptx::copy_wait<0>();
      __syncthreads();  // keys, queries and their numbers are there
      float p[T::kQueries / 8][4] = {}, ds[T::kQueries / 8][4] = {};
      key_tile_scores<T>(s, sequence, tile, lse, delta, first_key, first_query, p, ds);
      if constexpr (T::kOfValues) multiply_columns<T::kDim, T::kQueries>(d_v, p, tile.d_out);
      if constexpr (T::kOfKeys) multiply_columns<T::kDim, T::kQueries>(d_k, ds, tile.q);
    }
  }
  const int32_t row = first_key + static_cast<int32_t>(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4);
  const auto write = [&](const Tensor& to, const float(&x)[T::kDim / 8][4], float scale, int32_t dim) {
    write_gradient<T::kDim, Element>(x, scale, row, sequence.k_len, dim, [&](int32_t key) {
      return key_row<Element>(s, to, sequence, kv_head, key);
    });
  };
  if constexpr (T::kOfValues) write(call.d_v, d_v, 1.f, s.value_dim);
  if constexpr (T::kOfKeys) write(call.d_k, d_k, s.scale, s.head_dim);
}

// Grid: (tile of queries, head, sequence), the last tiles first.
template <class T>
__global__ void __launch_bounds__(T::kThreads)
    flash_query_gradient_mma_kernel(const __grid_constant__ BackwardCall call) {
  using Element = typename T::Element;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto* q_tile = reinterpret_cast<Element*>(shared_bytes);
  Element* d_out_tile = q_tile + T::kQueries * T::kDim;
  Element* k_tile = d_out_tile + T::kQueries * T::kDim;
  Element* v_tile = k_tile + T::kKeys * T::kDim;
  const Shape& s = call.shape;
  const int32_t m = call.tiles - 1 - static_cast<int32_t>(blockIdx.x % call.tiles);
  const auto rest = static_cast<int32_t>(blockIdx.x / call.tiles);
  const int32_t head = rest % s.heads, kv_head = head / s.group, first_query = m * T::kQueries;
  const SequenceRows sequence(s, rest / s.heads);
  if (first_query >= sequence.q_len) return;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int32_t query = first_query + 16 * warp + g;  // and + 8

  const auto* any = static_cast<const Element*>(call.q.data);
  const auto load_queries = [&](const Tensor& from, Element* to, int32_t dim) {
    load_tile<T::kDim, T::kQueries, T::kThreads>(to, first_query, sequence.q_len, dim, any, [&](int32_t row) {
      return query_row<const Element>(from, sequence, head, row);
    });
  };
  load_queries(call.q, q_tile, s.head_dim);
  load_queries(call.d_out, d_out_tile, s.value_dim);
  float lse[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = query + 8 * half;
    const int64_t at = row_value_start(s, sequence, head) + row;
    lse[half] = row < sequence.q_len ? call.lse[at] * kLog2e : 0.f;
    delta[half] = row < sequence.q_len ? call.delta[at] : 0.f;
  }
  float d_q[T::kDim / 8][4] = {};
  const KeyTiles<T::kKeys> tiles(s, sequence, head, first_query, T::kQueries);
  for (int32_t tile = 0; tile < tiles.count; ++tile) {
    const int32_t first_key = tiles.key(s, tile);
    const auto load_keys = [&](const Tensor& from, Element* to, int32_t dim) {
      load_tile<T::kDim, T::kKeys, T::kThreads>(to, first_key, sequence.k_len, dim, any, [&](int32_t row) {
        return key_row<const Element>(s, from, sequence, kv_head, row);
      });
    };
    __syncthreads();  // nobody reads the keys of before
    load_keys(call.k, k_tile, s.head_dim);
    load_keys(call.v, v_tile, s.value_dim);
    ptx::copy_commit();
    ptx::copy_wait<0>();
    __syncthreads();  // queries and keys are there
    float p[T::kKeys / 8][4] = {}, ds[T::kKeys / 8][4] = {};
    multiply_rows<T::kDim, T::kKeys>(p, q_tile, 16 * warp, k_tile);
    multiply_rows<T::kDim, T::kKeys>(ds, d_out_tile, 16 * warp, v_tile);
    const bool all_seen = sequence.sees_all(s, first_query, T::kQueries, first_key, T::kKeys);
#pragma unroll
    for (int n = 0; n < T::kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float score = score_of(s, p[n][i]);
        const bool seen = all_seen || sequence.sees(s, query + i / 2 * 8, first_key + 8 * n + 2 * t + i % 2);
        const float probability = seen ? exp2f(score - lse[i / 2]) : 0.f;
        ds[n][i] = probability * (ds[n][i] - delta[i / 2]) * slope_of(s, score);
      }
    }
    multiply_columns<T::kDim, T::kKeys>(d_q, ds, k_tile);
  }
  write_gradient<T::kDim, Element>(d_q, s.scale, query, sequence.q_len, s.head_dim, [&](int32_t row) {
    return query_row<Element>(call.d_q, sequence, head, row);
  });
}

template <class T>
void launch_tiles(void (*kernel)(BackwardCall), const char* name, BackwardCall call, int32_t longest,
                  int32_t rows, int32_t heads, cudaStream_t stream) {
  call.tiles = (longest + rows - 1) / rows;
  const int64_t grid = int64_t{call.tiles} * heads * call.shape.batch;
  if (grid == 0) return;
  if (T::kSharedBytes > 40 * 1024) {
    check_call(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(T::kSharedBytes)),
               "cudaFuncSetAttribute(flash_backward_mma)");
  }
  kernel<<<static_cast<unsigned>(grid), T::kThreads, T::kSharedBytes, stream>>>(call);
  check_launch(name);
}
template <class T>
void launch_key_gradient(const BackwardCall& call, cudaStream_t stream) {
  launch_tiles<T>(flash_key_gradient_mma_kernel<T>, "flash_key_gradient_mma", call, call.shape.max_k,
                  T::kKeys, call.shape.kv_heads, stream);
}
template <class T>
void launch_query_gradient(const BackwardCall& call, cudaStream_t stream) {
  launch_tiles<T>(flash_query_gradient_mma_kernel<T>, "flash_query_gradient_mma", call, call.shape.max_q,
                  T::kQueries, call.shape.heads, stream);
}

template <class Element>
void launch_type(const BackwardCall& call, cudaStream_t stream) {
  const int64_t rows = int64_t{call.shape.batch} * call.shape.heads * call.shape.max_q;
  if (rows > 0) {
    flash_delta_kernel<Element>
        <<<static_cast<unsigned>((rows + kDeltaWarps - 1) / kDeltaWarps), kDeltaWarps * 32, 0, stream>>>(
            call);
    check_launch("flash_delta");
  }
  switch (padded_dim(call.shape.head_dim, call.shape.value_dim)) {
    case 64:
      launch_key_gradient<KeyTile<Element, 64, KeyGradient::kBoth>>(call, stream);
      return launch_query_gradient<QueryTile<Element, 64>>(call, stream);
    case 128:
      launch_key_gradient<KeyTile<Element, 128, KeyGradient::kBoth>>(call, stream);
      return launch_query_gradient<QueryTile<Element, 128>>(call, stream);
    default:
      launch_key_gradient<KeyTile<Element, 256, KeyGradient::kKeys>>(call, stream);
      launch_key_gradient<KeyTile<Element, 256, KeyGradient::kValues>>(call, stream);
      return launch_query_gradient<QueryTile<Element, 256>>(call, stream);
  }
}

}  // namespace
}  // namespace flash_mma

size_t flash_backward_mma_workspace(const mr_flash_problem& problem) {
  const size_t rows = static_cast<size_t>(problem.batch) * static_cast<size_t>(problem.heads) *
                      static_cast<size_t>(problem.max_q);
  return (rows * sizeof(float) + 255) / 256 * 256;
}

void launch_flash_backward_mma(const mr_flash_problem& problem, const mr_flash_tensor& q,
                               const mr_flash_tensor& k, const mr_flash_tensor& v, const mr_flash_tensor& out,
                               const float* lse, const mr_flash_gradients& gradients, void* workspace,
                               cudaStream_t stream) {
  using namespace flash_mma;
  BackwardCall call{};
  call.shape = shape_of(problem);
  const bool ragged = call.shape.cu_q != nullptr;
  call.q = tensor_of(q, ragged), call.k = tensor_of(k, ragged), call.v = tensor_of(v, ragged);
  call.out = tensor_of(out, ragged), call.d_out = tensor_of(gradients.d_out, ragged);
  call.d_q = tensor_of(gradients.d_q, ragged), call.d_k = tensor_of(gradients.d_k, ragged);
  call.d_v = tensor_of(gradients.d_v, ragged);
  call.lse = lse;
  call.delta = static_cast<float*>(workspace);
  call.d_sinks = gradients.d_sinks;
  if (problem.type == MR_F32) {
    launch_type<float>(call, stream);
  } else {
    problem.type == MR_F16 ? launch_type<__half>(call, stream) : launch_type<__nv_bfloat16>(call, stream);
  }
  if (call.d_sinks == nullptr) return;
  flash_sink_gradient_kernel<<<static_cast<unsigned>(call.shape.heads), kSinkThreads, 0, stream>>>(call);
  check_launch("flash_sink_gradient");
}

}  // namespace millrace::cuda
