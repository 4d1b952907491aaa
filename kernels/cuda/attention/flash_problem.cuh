// What the attention kernels over tensors know of their problem: lengths, which keys a row sees, where rows
// lie, and the tensor maps through which tiles are loaded.
//
// A map has five dimensions, (dim, row, c2, c3, c4), so that one instruction loads any layout:
//   dense:  (dim, seq, head, batch, 1)
//   ragged: (dim, longest, offset, head, 1), where `row` and `offset` have the same stride and the base
//           lies `longest` rows before the data. Row r of a sequence of n rows from `start` on is row =
//           longest - n + r, offset = start + n: the address is right, and what lies past the sequence's
//           end is past `longest`, so that it reads as zeros and not as the next sequence.
//   paged:  (dim, row, page, head, 1), and where a sequence's end cuts a box,
//           (dim, box, offset, page, head) with the same trick within the box.
// A box that lies outside altogether, in a map whose base lies before the data, now and then was an illegal
// access. Zeros matter for values: a probability of zero does not undo a NaN of somebody else's row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/tile/launch.cuh"
#include "kernels/cuda/tile/reduce.cuh"
#include "kernels/cuda/tile/tensor_map.cuh"
#include "millrace/kernels/flash_attention.h"
#include "millrace/kernels/tile/ptx/approx.cuh"
#include "millrace/kernels/tile/ptx/wgmma_16bit.cuh"

namespace millrace::cuda {

inline constexpr float kFlashLog2e = 1.4426950408889634f, kFlashLn2 = 0.6931471805599453f;
inline constexpr int kFlashPart = 64;        // 16-bit elements of a swizzled row of 128 bytes
inline constexpr int kFlashScaleKeys = 128;  // keys that share a scale where they are E4M3 codes

// Rows [start, start + length) of one sequence, in a map's coordinates.
struct FlashRows {
  int32_t row, c2, c3;
};

// A tensor by strides, in elements; of a ragged one batch_stride is 0.
struct FlashStrides {
  int64_t batch, seq, head;
};

// By value to the kernels.
struct FlashShape {
  int32_t batch, heads, kv_heads, group;
  int32_t max_q, max_k;
  const int32_t *cu_q, *cu_k;  // null: dense
  const int32_t* pages;        // null: not paged
  int64_t pages_stride;
  int32_t page_tokens;
  const int32_t* k_lengths;
  float scale, scale_log2, softcap;
  int32_t window_left, window_right;  // open: kFlashOpen
  const float* sinks;
};
inline constexpr int32_t kFlashOpen = 1 << 30;

// A sequence of the call.
struct FlashSequence {
  int32_t q_start, q_len, k_start, k_len;

  __device__ FlashSequence(const FlashShape& s, int32_t b) {
    q_start = s.cu_q != nullptr ? s.cu_q[b] : 0;
    q_len = s.cu_q != nullptr ? s.cu_q[b + 1] - q_start : s.max_q;
    const bool ragged_k = s.pages == nullptr && s.cu_k != nullptr;
    k_start = ragged_k ? s.cu_k[b] : 0;
    k_len = s.pages != nullptr ? s.k_lengths[b] : ragged_k ? s.cu_k[b + 1] - k_start : s.max_k;
  }
  // Where query 0 stands among the keys; negative where there are more queries than keys.
  __device__ int32_t offset() const { return k_len - q_len; }
  // The first key that the query sees, and past the last.
  __device__ int32_t first_key(const FlashShape& s, int32_t query) const {
    return max(0, query + offset() - s.window_left);
  }
  __device__ int32_t past_key(const FlashShape& s, int32_t query) const {
    return min(k_len, query + offset() + s.window_right + 1);
  }
  // The first query that sees the key, and past the last.
  __device__ int32_t first_query(const FlashShape& s, int32_t key) const {
    return max(0, key - offset() - s.window_right);
  }
  __device__ int32_t past_query(const FlashShape& s, int32_t key) const {
    return min(q_len, key - offset() + s.window_left + 1);
  }
};

// Coordinates of rows of q, or of k and v that are not paged.
__device__ inline FlashRows flash_rows(bool ragged, int32_t longest, int32_t start, int32_t length,
                                       int32_t head, int32_t b) {
  return ragged ? FlashRows{longest - length, start + length, head} : FlashRows{0, head, b};
}
__device__ inline int64_t flash_row_at(const FlashStrides& s, int32_t b, int32_t start, int32_t row,
                                       int32_t head) {
  return b * s.batch + (int64_t{start} + row) * s.seq + head * s.head;
}
// Where a row's lse lies: [batch, heads, max_q], ragged [heads, cu_q[batch]].
__device__ inline int64_t flash_lse_at(const FlashShape& s, int32_t b, int32_t start, int32_t head) {
  return s.cu_q != nullptr ? int64_t{head} * s.cu_q[s.batch] + start
                           : (int64_t{b} * s.heads + head) * s.max_q;
}

inline FlashShape flash_shape(const mr_flash_problem& p) {
  FlashShape s{};
  s.batch = p.batch, s.heads = p.heads, s.kv_heads = p.kv_heads, s.group = p.heads / p.kv_heads;
  s.max_q = p.max_q, s.max_k = p.max_k, s.cu_q = p.cu_q, s.cu_k = p.cu_k;
  s.pages = p.pages, s.pages_stride = p.pages_stride, s.page_tokens = p.page_tokens,
  s.k_lengths = p.k_lengths;
  s.scale = p.scale, s.scale_log2 = p.scale * kFlashLog2e, s.softcap = p.softcap;
  s.window_left = p.window_left < 0 || p.window_left > kFlashOpen ? kFlashOpen : p.window_left;
  s.window_right = p.window_right < 0 || p.window_right > kFlashOpen ? kFlashOpen : p.window_right;
  s.sinks = p.sinks;
  return s;
}
inline FlashStrides flash_strides(const mr_flash_tensor& t, bool ragged) {
  return {ragged ? 0 : t.batch_stride, t.seq_stride, t.head_stride};
}

// A map over rows of `dim` elements; `heads` and `longest` are those of this tensor.
inline CUtensorMap flash_map(const Device& device, const mr_flash_tensor& t, int element_bytes, bool ragged,
                             int32_t dim, int32_t longest, int32_t heads, int32_t batch, uint32_t box_rows) {
  const auto bytes = [&](int64_t stride) { return static_cast<cuuint64_t>(stride * element_bytes); };
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n > 0 ? n : 1); };
  const cuuint64_t row = bytes(t.seq_stride);
  const uint32_t columns = static_cast<uint32_t>(ptx::kSwizzleRowBytes / element_bytes);
  if (ragged) {
    const cuuint64_t sizes[5] = {size(dim), size(longest), cuuint64_t{1} << 30, size(heads), 1};
    const cuuint64_t strides[4] = {row, row, bytes(t.head_stride), row};
    return ptx::swizzled_map(device, static_cast<const uint8_t*>(t.data) - longest * row, element_bytes == 1,
                             sizes, strides, columns, box_rows);
  }
  const cuuint64_t sizes[5] = {size(dim), size(longest), size(heads), size(batch), 1};
  const cuuint64_t strides[4] = {row, heads > 1 ? bytes(t.head_stride) : row,
                                 batch > 1 ? bytes(t.batch_stride) : row, row};
  return ptx::swizzled_map(device, t.data, element_bytes == 1, sizes, strides, columns, box_rows);
}
// A map over queries with all heads of a group, [dim, group, seq, ..]: a box is rows / group tokens with a
// row for each of their heads.
inline CUtensorMap flash_group_map(const Device& device, const mr_flash_tensor& t, int element_bytes,
                                   bool ragged, int32_t dim, int32_t longest, int32_t kv_heads, int32_t group,
                                   int32_t batch, uint32_t box_rows) {
  const auto bytes = [&](int64_t stride) { return static_cast<cuuint64_t>(stride * element_bytes); };
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n > 0 ? n : 1); };
  const cuuint64_t row = bytes(t.seq_stride), head = bytes(t.head_stride),
                   heads = bytes(t.head_stride * group);
  const auto columns = static_cast<uint32_t>(ptx::kSwizzleRowBytes / element_bytes);
  const auto in_group = static_cast<uint32_t>(group);
  if (ragged) {
    const cuuint64_t sizes[5] = {size(dim), size(group), size(longest), cuuint64_t{1} << 30, size(kv_heads)};
    const cuuint64_t strides[4] = {head, row, row, heads};
    return ptx::swizzled_map(device, static_cast<const uint8_t*>(t.data) - longest * row, element_bytes == 1,
                             sizes, strides, columns, in_group, box_rows / in_group);
  }
  const cuuint64_t sizes[5] = {size(dim), size(group), size(longest), size(kv_heads), size(batch)};
  const cuuint64_t strides[4] = {head, row, heads, batch > 1 ? bytes(t.batch_stride) : row};
  return ptx::swizzled_map(device, t.data, element_bytes == 1, sizes, strides, columns, in_group,
                           box_rows / in_group);
}
// How many pages there are only the page table knows: as many as fit any GPU's memory.
inline cuuint64_t flash_page_limit(const mr_flash_tensor& t, int element_bytes) {
  const int64_t page = t.batch_stride * element_bytes;
  return static_cast<cuuint64_t>(page > 0 ? (int64_t{1} << 38) / page + 1 : 1);
}
// Of pages: boxes of box_rows within one page, (dim, row, page, head).
inline CUtensorMap flash_page_map(const Device& device, const mr_flash_tensor& t, int element_bytes,
                                  int32_t dim, int32_t page_tokens, int32_t heads, uint32_t box_rows) {
  const auto bytes = [&](int64_t stride) { return static_cast<cuuint64_t>(stride * element_bytes); };
  const cuuint64_t row = bytes(t.seq_stride);
  const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(page_tokens),
                               flash_page_limit(t, element_bytes), static_cast<cuuint64_t>(heads), 1};
  const cuuint64_t strides[4] = {row, bytes(t.batch_stride), heads > 1 ? bytes(t.head_stride) : row, row};
  return ptx::swizzled_map(device, t.data, element_bytes == 1, sizes, strides,
                           static_cast<uint32_t>(ptx::kSwizzleRowBytes / element_bytes), box_rows);
}
// Of boxes of which only the first rows count. Its base lies before the data: no box may lie outside
// altogether.
inline CUtensorMap flash_page_end_map(const Device& device, const mr_flash_tensor& t, int element_bytes,
                                      int32_t dim, int32_t page_tokens, int32_t heads, uint32_t box_rows) {
  const auto bytes = [&](int64_t stride) { return static_cast<cuuint64_t>(stride * element_bytes); };
  const cuuint64_t row = bytes(t.seq_stride);
  const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(dim), box_rows,
                               static_cast<cuuint64_t>(page_tokens) + box_rows,
                               flash_page_limit(t, element_bytes), static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[4] = {row, row, bytes(t.batch_stride), heads > 1 ? bytes(t.head_stride) : row};
  return ptx::swizzled_map(device, static_cast<const uint8_t*>(t.data) - box_rows * row, element_bytes == 1,
                           sizes, strides, static_cast<uint32_t>(ptx::kSwizzleRowBytes / element_bytes),
                           box_rows);
}

template <class Element>
__device__ inline uint32_t flash_pack(float low, float high) {
  if constexpr (std::is_same_v<Element, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}
template <class Element>
__device__ inline float2 flash_unpack(uint32_t pair) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
}
// Of a quad: word w of lane t becomes word t of lane w, so that four lanes' pairs of eight columns become
// each lane's eight columns.
__device__ inline void flash_quad_transpose(uint32_t (&w)[4]) {
  const bool high = (threadIdx.x & 2) != 0, odd = (threadIdx.x & 1) != 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(kAllLanes, high ? w[i] : w[i + 2], 2);
    w[i] = high ? got : w[i];
    w[i + 2] = high ? w[i + 2] : got;
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(kAllLanes, odd ? w[i] : w[i + 1], 1);
    w[i] = odd ? got : w[i];
    w[i + 1] = odd ? w[i + 1] : got;
  }
}

// softcap * tanh(x / softcap) in units of log 2; exact to some 1e-7 of softcap.
__device__ inline float flash_tanh(float x) {
  const float e = ptx::exp2_approx(x * (2.0f * kFlashLog2e));
  return 1.0f - 2.0f * ptx::reciprocal_approx(e + 1.0f);
}

}  // namespace millrace::cuda
