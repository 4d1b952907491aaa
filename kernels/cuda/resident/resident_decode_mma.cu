// One decode step on tensor cores, from sm_75 on. A warp takes 16 keys at a time straight from global memory
// to the fragments of the products, without shared memory: sums over dimensions and the order of output
// columns may be permuted freely, so a lane's 16 contiguous bytes of a key or value row are its share of
// several products.
//   scores: lane (g, t) holds dimensions 32i + 8t .. + 8 of key g; pairs (4s, 4s + 1), (4s + 2, 4s + 3)
//           of them are b0 and b1 of step (i, s), and the query fragments are loaded in the same order.
//   output: lane (g, t) holds dimensions 64c + 8g .. + 8 of keys 2t, 2t + 1, 2t + 8, 2t + 9; column g of the
//           product (c, j) is dimension 64c + 8g + j.
#include "kernels/cuda/resident/resident_reduce.cuh"
#include "millrace/kernels/tile/ptx/mma_f16.cuh"

namespace millrace::cuda::resident {
namespace {

__device__ inline uint32_t part(const uint4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}
__device__ inline uint32_t pack(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
// 16 bytes of a row, zeros where the row is not there: its probability is 0, and 0 times what lies there may
// be NaN.
__device__ inline uint4 load_row(const __half* row, bool there) {
  return there ? __ldg(reinterpret_cast<const uint4*>(row)) : uint4{0, 0, 0, 0};
}

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
__device__ inline void softmax_step(float (&scores)[T::kSteps][2][4], int left, int stride, float scale_log2,
                                    WarpState<T>& state) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < T::kRows / 8; ++half) {
    float top = state.row_max[half];
#pragma unroll
    for (int x = 0; x < T::kSteps * 4; ++x) {
      const int key = x / 4 * stride + x / 2 % 2 * 8 + 2 * t + x % 2;
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
  const int stride = static_cast<int>(blockDim.x / 32) * kKeysPerStep;  // few keys occupy all warps
  const int first_of_warp = first + static_cast<int>(threadIdx.x / 32) * kKeysPerStep;
  for (int key = first_of_warp; key < end; key += stride * T::kSteps) {
    uint4 keys[T::kSteps][2][T::kDim / 32], values[T::kSteps][4][T::kDim / 64];
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int row = key + stride * s + 8 * n + g;
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
        const int row = key + stride * s + 2 * t + n / 2 * 8 + n % 2;
#pragma unroll
        for (int c = 0; c < T::kDim / 64; ++c) {
          values[s][n][c] = load_row(v + static_cast<int64_t>(row) * T::kDim + 64 * c + 8 * g, row < end);
        }
      }
    }
    float scores[T::kSteps][2][4] = {};
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) scores_of<T>(q, keys[s], scores[s]);
    softmax_step<T>(scores, end - key, stride, scale_log2, state);
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) add_values<T>(scores[s], values[s], state.out);
  }
}

// Grid (tiles, splits); of kCluster, the splits of a tile are a cluster. Tile: row tiles of a KV head beside
// one another.
template <class T, bool kCluster>
__global__ void __launch_bounds__(T::kThreads)
    resident_decode_mma_kernel(DecodeCall call, SplitPlan plan, ResidentWorkspace workspace,
                               float scale_log2) {
  __shared__ Shared<T> shared;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row_tiles = call.shape.row_tiles(), group = call.shape.group();
  const int tile = blockIdx.x, kv_head = tile / row_tiles, first_row = tile % row_tiles * T::kRows;
  const int rows = min(T::kRows, group - first_row);
  const int64_t first_head = static_cast<int64_t>(kv_head) * group + first_row;
  const int split = blockIdx.y;

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

  store_outputs<T>(state, shared);
  const OutputRows out{call.out + first_head * call.shape.head_dim, rows, call.shape.head_dim};
  if constexpr (kCluster) {
    reduce_cluster<T>(plan.splits, shared, out);
  } else if (plan.splits == 1) {
    write_block<T>(shared, out);
  } else {
    reduce_by_ticket<T>(workspace, tile, split, plan.splits, shared, out);
  }
}

template <class T, bool kCluster>
cudaLaunchConfig_t config_of(const DecodeCall& call, SplitPlan plan, cudaLaunchAttribute* attribute,
                             cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(call.shape.tiles()), static_cast<unsigned>(plan.splits));
  // No more warps than have keys.
  const int32_t keys = call.keys < plan.keys_per_split ? call.keys : plan.keys_per_split;
  const int32_t warps = (keys + kKeysPerStep - 1) / kKeysPerStep;
  config.blockDim = dim3(static_cast<unsigned>(warps < T::kWarps ? warps : T::kWarps) * 32);
  config.stream = stream;
  if (kCluster) {
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim = {1, static_cast<unsigned>(plan.splits), 1};
    config.attrs = attribute;
    config.numAttrs = 1;
  }
  return config;
}

template <class T>
cudaError_t launch(const DecodeCall& call, SplitPlan plan, const ResidentWorkspace& workspace,
                   cudaStream_t stream) {
  const float scale_log2 = 1.44269504f / sqrtf(static_cast<float>(call.shape.head_dim));
  cudaLaunchAttribute attribute{};
  if (plan.cluster) {
    const cudaLaunchConfig_t config = config_of<T, true>(call, plan, &attribute, stream);
    return cudaLaunchKernelEx(&config, resident_decode_mma_kernel<T, true>, call, plan, workspace,
                              scale_log2);
  }
  const cudaLaunchConfig_t config = config_of<T, false>(call, plan, &attribute, stream);
  return cudaLaunchKernelEx(&config, resident_decode_mma_kernel<T, false>, call, plan, workspace, scale_log2);
}

// The largest cluster of these blocks that this GPU and this code can have: 16, 8, or 0.
template <class T>
int32_t largest_cluster(const ResidentShape& shape) {
  const auto kernel = resident_decode_mma_kernel<T, true>;
  cudaFuncAttributes attributes{};
  // ptxVersion: of the source that the driver translated, where it did.
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess || attributes.ptxVersion < 90 ||
      attributes.binaryVersion < 90 ||
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  for (const int32_t size : {16, 8}) {
    const DecodeCall call{shape, nullptr, nullptr, nullptr, nullptr, kMaxKeysOfOneBlock * size};
    cudaLaunchAttribute attribute{};
    const cudaLaunchConfig_t config =
        config_of<T, true>(call, {size, kMaxKeysOfOneBlock, true}, &attribute, nullptr);
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess && clusters > 0)
      return size;
    (void)cudaGetLastError();
  }
  return 0;
}

// Calls `body` with the tile of a shape: every instantiation there is.
template <class Body>
auto with_tile(const ResidentShape& shape, const Body& body) {
  const bool half = shape.tile_rows() == 8;
  switch (shape.padded_dim()) {
    case 64:
      return half ? body(Tile<64, 8>{}) : body(Tile<64, 16>{});
    case 128:
      return half ? body(Tile<128, 8>{}) : body(Tile<128, 16>{});
    default:
      return half ? body(Tile<256, 8>{}) : body(Tile<256, 16>{});
  }
}

}  // namespace

cudaError_t launch_decode_mma(const DecodeCall& call, SplitPlan plan, const ResidentWorkspace& workspace,
                              cudaStream_t stream) {
  return with_tile(call.shape,
                   [&](auto tile) { return launch<decltype(tile)>(call, plan, workspace, stream); });
}

int32_t max_cluster_size(const ResidentShape& shape) {
  return with_tile(shape, [&](auto tile) { return largest_cluster<decltype(tile)>(shape); });
}

}  // namespace millrace::cuda::resident
