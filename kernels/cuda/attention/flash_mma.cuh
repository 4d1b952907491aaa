// What the mma.sync attention kernels share: the problem by value, which keys a row sees, tiles in shared
// memory and their fragments. float32 has the same kernels with products of its own, by FMA: a lane has the
// same elements of every result.
//
// A tile is rows of kDim elements, 16-byte chunks; chunk c of row r lies at c ^ (r % 8), so that the eight
// rows of an 8 x 8 matrix lie in different banks. Dimensions past the tensor's are zeros, and so are rows
// past a sequence's end: a probability of zero does not undo a NaN that lies there.
#pragma once

#include <cuda_fp8.h>

#include "kernels/cuda/attention/flash_mma.h"
#include "kernels/cuda/tile/reduce.cuh"
#include "millrace/kernels/tile/ptx/mma.cuh"
#include "millrace/kernels/tile/ptx/mma_16bit.cuh"

namespace millrace::cuda::flash_mma {

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
inline constexpr int32_t kOpen = 1 << 30;  // an open side of a window
inline constexpr int32_t kKeysPerScale = 128;

struct Tensor {
  void* data;
  int64_t batch, seq, head;  // strides in elements; of a ragged one batch is 0
};

struct Shape {
  int32_t batch, heads, kv_heads, group, head_dim, value_dim, max_q, max_k;
  const int32_t *cu_q, *cu_k;  // null: dense
  const int32_t* pages;        // null: not paged
  int64_t pages_stride;
  int32_t page_tokens;
  const int32_t* k_lengths;
  float scale, softcap;
  int32_t window_left, window_right;
  const float* sinks;
  // E4M3: of a row of q, as its rows lie, and of kKeysPerScale keys; null otherwise.
  const float *q_scales, *k_scales, *v_scales;
  // Block-sparse: row_starts null where every block counts.
  int32_t block_q, block_k, q_blocks;
  const int32_t *row_starts, *columns;
};

inline Shape shape_of(const mr_flash_problem& p) {
  Shape s{};
  s.batch = p.batch, s.heads = p.heads, s.kv_heads = p.kv_heads, s.group = p.heads / p.kv_heads;
  s.head_dim = p.head_dim, s.value_dim = p.value_dim, s.max_q = p.max_q, s.max_k = p.max_k;
  s.cu_q = p.cu_q, s.cu_k = p.pages == nullptr ? p.cu_k : nullptr;
  s.pages = p.pages, s.pages_stride = p.pages_stride, s.page_tokens = p.page_tokens,
  s.k_lengths = p.k_lengths;
  s.scale = p.scale, s.softcap = p.softcap, s.sinks = p.sinks;
  s.window_left = p.window_left < 0 || p.window_left > kOpen ? kOpen : p.window_left;
  s.window_right = p.window_right < 0 || p.window_right > kOpen ? kOpen : p.window_right;
  s.q_scales = p.q_scales, s.k_scales = p.k_scales, s.v_scales = p.v_scales;
  if (p.blocks != nullptr) {
    s.block_q = p.blocks->block_q, s.block_k = p.blocks->block_k, s.q_blocks = p.blocks->q_blocks;
    s.row_starts = p.blocks->row_starts, s.columns = p.blocks->columns;
  }
  return s;
}
inline Tensor tensor_of(const mr_flash_tensor& t, bool ragged) {
  return {t.data, ragged ? 0 : t.batch_stride, t.seq_stride, t.head_stride};
}

// One sequence of the call.
struct SequenceRows {
  int32_t index, q_start, q_len, k_start, k_len;

  __device__ SequenceRows(const Shape& s, int32_t b) : index(b) {
    q_start = s.cu_q != nullptr ? s.cu_q[b] : 0;
    q_len = s.cu_q != nullptr ? s.cu_q[b + 1] - q_start : s.max_q;
    k_start = s.cu_k != nullptr ? s.cu_k[b] : 0;
    k_len = s.pages != nullptr ? s.k_lengths[b] : s.cu_k != nullptr ? s.cu_k[b + 1] - k_start : s.max_k;
  }
  // Where query 0 stands among the keys; negative where there are more queries than keys.
  __device__ int32_t offset() const { return k_len - q_len; }
  __device__ bool sees(const Shape& s, int32_t query, int32_t key) const {
    const int32_t position = query + offset();
    return query < q_len && key < k_len && key >= position - s.window_left &&
           key <= position + s.window_right;
  }
  // Whether every query of [query, query + queries) sees every key of [key, key + keys).
  __device__ bool sees_all(const Shape& s, int32_t query, int32_t queries, int32_t key, int32_t keys) const {
    return query + queries <= q_len && key + keys <= k_len &&
           key >= query + queries - 1 + offset() - s.window_left &&
           key + keys - 1 <= query + offset() + s.window_right;
  }
  // Keys that some query of [query, past) sees: from here, to before there.
  __device__ int32_t first_key(const Shape& s, int32_t query) const {
    return max(0, query + offset() - s.window_left);
  }
  __device__ int32_t past_key(const Shape& s, int32_t past) const {
    return min(k_len, past - 1 + offset() + s.window_right + 1);
  }
  // Queries that see some key of [key, past).
  __device__ int32_t first_query(const Shape& s, int32_t key) const {
    return max(0, key - offset() - s.window_right);
  }
  __device__ int32_t past_query(const Shape& s, int32_t past) const {
    return min(q_len, past - 1 - offset() + s.window_left + 1);
  }
};

// lse and its like: [batch, heads, max_q], ragged [heads, cu_q[batch]].
__device__ inline int64_t row_value_start(const Shape& s, const SequenceRows& sequence, int32_t head) {
  return s.cu_q != nullptr ? int64_t{head} * s.cu_q[s.batch] + sequence.q_start
                           : (int64_t{sequence.index} * s.heads + head) * s.max_q;
}

// Rows of one sequence and head: q, out and their gradients, or keys and values.
template <class Element>
__device__ inline Element* query_row(const Tensor& t, const SequenceRows& sequence, int32_t head,
                                     int32_t row) {
  return static_cast<Element*>(t.data) + sequence.index * t.batch +
         (int64_t{sequence.q_start} + row) * t.seq + head * t.head;
}
template <class Element>
__device__ inline Element* key_row(const Shape& s, const Tensor& t, const SequenceRows& sequence,
                                   int32_t head, int32_t row) {
  auto* data = static_cast<Element*>(t.data) + head * t.head;
  if (s.pages != nullptr) {
    const int64_t page = s.pages[sequence.index * s.pages_stride + row / s.page_tokens];
    return data + page * t.batch + (row % s.page_tokens) * t.seq;
  }
  return data + sequence.index * t.batch + (int64_t{sequence.k_start} + row) * t.seq;
}

template <class Element>
__device__ inline uint32_t pack(float low, float high) {
  if constexpr (sizeof(Element) == 2 && __is_same(Element, __half)) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// 16 bytes of a tile.
template <class Element>
inline constexpr int kChunkElements = 16 / sizeof(Element);
template <int kDim, class Element>
__device__ inline Element* chunk_of(Element* tile, int row, int chunk) {
  return tile + row * kDim + ((chunk ^ (row & 7)) * kChunkElements<Element>);
}

// Copies rows [first, first + kRows) of `row_at`'s tensor into the tile; not those from `count` on, nor
// elements from dim on.
template <int kDim, int kRows, int kThreads, class Element, class RowAt>
__device__ inline void load_tile(Element* tile, int32_t first, int32_t count, int32_t dim,
                                 const Element* any_address, const RowAt& row_at) {
  constexpr int kElements = kChunkElements<Element>, kChunks = kDim / kElements;
  static_assert(kRows * kChunks % kThreads == 0);
#pragma unroll 4
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool there = first + row < count && chunk * kElements < dim;
    const Element* from = there ? row_at(first + row) + chunk * kElements : any_address;
    ptx::copy16_or_zero(chunk_of<kDim>(tile, row, chunk), from, there);
  }
}

// The same of E4M3 codes, which bf16 holds exactly.
template <int kDim, int kRows, int kThreads, class RowAt>
__device__ inline void load_codes(__nv_bfloat16* tile, int32_t first, int32_t count, int32_t dim,
                                  const RowAt& row_at) {
  constexpr int kChunks = kDim / 8;
  static_assert(kRows * kChunks % kThreads == 0);
#pragma unroll 4
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool there = first + row < count && chunk * 8 < dim;
    const uint2 codes =
        there ? *reinterpret_cast<const uint2*>(row_at(first + row) + chunk * 8) : uint2{0u, 0u};
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t four = w < 2 ? codes.x : codes.y;
      const auto pair = static_cast<__nv_fp8x2_storage_t>(w % 2 == 0 ? four & 0xffffu : four >> 16);
      const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
      words[w] = pack<__nv_bfloat16>(values.x, values.y);
    }
    *reinterpret_cast<uint4*>(chunk_of<kDim>(tile, row, chunk)) = {words[0], words[1], words[2], words[3]};
  }
}

// Fragments. a: rows [row, row + 16), elements [16k, 16k + 16).
template <int kDim, class Element>
__device__ inline void load_a(uint32_t (&a)[4], const Element* tile, int row, int k) {
  const int lane = threadIdx.x % 32;
  const uint4 m = ptx::ldmatrix_x4(chunk_of<kDim>(tile, row + lane % 16, 2 * k + lane / 16));
  a[0] = m.x, a[1] = m.y, a[2] = m.z, a[3] = m.w;
}
// b of a product with the tile's transpose: columns are rows [row, row + 16) of the tile (x, y: of the first
// eight; z, w: of the others), depth its elements [16k, 16k + 16).
template <int kDim, class Element>
__device__ inline uint4 load_b_rows(const Element* tile, int row, int k) {
  const int lane = threadIdx.x % 32;
  return ptx::ldmatrix_x4(chunk_of<kDim>(tile, row + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
}
// b of a product with the tile: depth is rows [row, row + 16), columns are elements [16n, 16n + 16) (x, y: of
// the first eight; z, w: of the others).
template <int kDim, class Element>
__device__ inline uint4 load_b_columns(const Element* tile, int row, int n) {
  const int lane = threadIdx.x % 32;
  return ptx::ldmatrix_x4_transposed(chunk_of<kDim>(tile, row + lane % 16, 2 * n + lane / 16));
}

// c [16 rows, kColumns of them] += a_tile rows [row, row + 16) x (b_tile rows)^T, over kDim. A lane's: rows g
// and g + 8, columns 8n + 2t and + 1.
template <int kDim, int kColumns>
__device__ inline void multiply_rows(float (&c)[kColumns / 8][4], const float* a_tile, int row,
                                     const float* b_tile) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 4
  for (int k = 0; k < kDim / 4; ++k) {
    float4 a[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      a[half] = *reinterpret_cast<const float4*>(chunk_of<kDim>(a_tile, row + g + 8 * half, k));
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 b = *reinterpret_cast<const float4*>(chunk_of<kDim>(b_tile, 8 * n + 2 * t + i, k));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& sum = c[n][2 * half + i];
          sum = fmaf(a[half].x, b.x, sum);
          sum = fmaf(a[half].y, b.y, sum);
          sum = fmaf(a[half].z, b.z, sum);
          sum = fmaf(a[half].w, b.w, sum);
        }
      }
    }
  }
}
template <int kDim, int kColumns, class Element>
__device__ inline void multiply_rows(float (&c)[kColumns / 8][4], const Element* a_tile, int row,
                                     const Element* b_tile) {
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[4];
    load_a<kDim>(a, a_tile, row, k);
#pragma unroll
    for (int n = 0; n < kColumns; n += 16) {
      const uint4 b = load_b_rows<kDim>(b_tile, n, k);
      ptx::mma_16bit<Element>(c[n / 8], a, b.x, b.y);
      ptx::mma_16bit<Element>(c[n / 8 + 1], a, b.z, b.w);
    }
  }
}

// A lane's two neighbours of a row.
template <class Element>
__device__ inline void store_pair(Element* to, float low, float high) {
  if constexpr (__is_same(Element, float)) {
    *reinterpret_cast<float2*>(to) = {low, high};
  } else {
    *reinterpret_cast<uint32_t*>(to) = pack<Element>(low, high);
  }
}

// out [16 rows, kDim] += p [16 rows, kDepth] x b_tile [kDepth rows, kDim]; p as a product left it, rounded
// here to the elements' type. Of float32 a quad's lanes tell one another their columns of p.
template <int kDim, int kDepth>
__device__ inline void multiply_columns(float (&out)[kDim / 8][4], const float (&p)[kDepth / 8][4],
                                        const float* b_tile) {
  const int quad = threadIdx.x % 32 & ~3, t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kDepth; ++j) {
    const float low = __shfl_sync(~0u, p[j / 8][j % 2], quad + j % 8 / 2);
    const float high = __shfl_sync(~0u, p[j / 8][2 + j % 2], quad + j % 8 / 2);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float2 b = *reinterpret_cast<const float2*>(chunk_of<kDim>(b_tile, j, 2 * n + t / 2) + t % 2 * 2);
      out[n][0] = fmaf(low, b.x, out[n][0]);
      out[n][1] = fmaf(low, b.y, out[n][1]);
      out[n][2] = fmaf(high, b.x, out[n][2]);
      out[n][3] = fmaf(high, b.y, out[n][3]);
    }
  }
}
template <int kDim, int kDepth, class Element>
__device__ inline void multiply_columns(float (&out)[kDim / 8][4], const float (&p)[kDepth / 8][4],
                                        const Element* b_tile) {
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    const uint32_t a[4] = {pack<Element>(p[2 * k][0], p[2 * k][1]), pack<Element>(p[2 * k][2], p[2 * k][3]),
                           pack<Element>(p[2 * k + 1][0], p[2 * k + 1][1]),
                           pack<Element>(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      const uint4 b = load_b_columns<kDim>(b_tile, 16 * k, n);
      ptx::mma_16bit<Element>(out[2 * n], a, b.x, b.y);
      ptx::mma_16bit<Element>(out[2 * n + 1], a, b.z, b.w);
    }
  }
}

// The score in base 2 of a dot product, and how it changes with scale x dot product.
__device__ inline float score_of(const Shape& s, float dot) {
  if (s.softcap == 0.f) return dot * (s.scale * kLog2e);
  return s.softcap * kLog2e * tanhf(dot * s.scale / s.softcap);
}
__device__ inline float slope_of(const Shape& s, float score) {
  if (s.softcap == 0.f) return 1.f;
  const float t = score / (s.softcap * kLog2e);
  return 1.f - t * t;
}

// Which tiles of kTile keys the queries [query, query + queries) of one block row have: all from the first
// key that one of them sees, or those of the block row's list. queries <= block_q, within one block row.
template <int kTile>
struct KeyTiles {
  int32_t first = 0, count = 0;         // dense
  int32_t list = 0, tiles_a_block = 1;  // block-sparse: where the list begins

  __device__ KeyTiles(const Shape& s, const SequenceRows& sequence, int32_t head, int32_t query,
                      int32_t queries) {
    const int32_t past = min(query + queries, sequence.q_len);
    if (s.row_starts != nullptr) {
      const int64_t n = (int64_t{sequence.index} * s.heads + head) * s.q_blocks + query / s.block_q;
      list = s.row_starts[n];
      tiles_a_block = s.block_k / kTile;
      count = (s.row_starts[n + 1] - list) * tiles_a_block;
      return;
    }
    first = sequence.first_key(s, query) / kTile;  // tiles begin where they would for any other rows
    count = max(0, (sequence.past_key(s, past) + kTile - 1) / kTile - first);
  }
  __device__ int32_t key(const Shape& s, int32_t tile) const {
    if (s.row_starts == nullptr) return (first + tile) * kTile;
    return s.columns[list + tile / tiles_a_block] * s.block_k + tile % tiles_a_block * kTile;
  }
};

inline int padded_dim(int32_t head_dim, int32_t value_dim) {
  const int32_t dim = head_dim > value_dim ? head_dim : value_dim;
  return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
}

}  // namespace millrace::cuda::flash_mma
