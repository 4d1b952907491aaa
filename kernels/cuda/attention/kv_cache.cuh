// A layer's paged keys and values as the rope and attention kernels address them, for each type they are kept
// in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "base/paging.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/attention/kv_fp8.cuh"

namespace millrace::cuda {

__device__ inline float cache_to_float(float x) { return x; }
__device__ inline float cache_to_float(__half x) { return __half2float(x); }
__device__ inline float cache_to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounded to nearest, ties to even.
__device__ inline void store_cache(float x, float* to) { *to = x; }
__device__ inline void store_cache(float x, __half* to) { *to = __float2half_rn(x); }
__device__ inline void store_cache(float x, __nv_bfloat16* to) { *to = __float2bfloat16_rn(x); }

// The keys of one KV head in one block: [16][head_dim], in the cache's order. Its values lie value_distance()
// elements further.
template <class T>
__device__ inline T* keys_of_block(const LayerCache& cache, int32_t block, int kv_head) {
  return static_cast<T*>(cache.pool) + block * cache.block_elements + cache.layer_offset +
         static_cast<int64_t>(kv_head) * kBlockTokens * cache.head_dim;
}
__device__ inline int64_t value_distance(const LayerCache& cache) {
  return static_cast<int64_t>(cache.kv_heads) * kBlockTokens * cache.head_dim;
}

__device__ inline int swizzled_offset(int in_block, int d) {
  return d / 64 * (kBlockTokens * 64) + in_block * 64 + ((d % 64) ^ (in_block % 8 * 8));
}
// Where element `d` of the key or value at place `in_block` of a block lies.
__device__ inline int cache_offset(const LayerCache& cache, int in_block, int d) {
  if (cache.order == CacheOrder::kRows) return in_block * cache.head_dim + d;
  return swizzled_offset(in_block, d);
}

// e4m3 codes: their heads lie as kv_fp8.cuh says.
struct Fp8Code {
  uint8_t bits;
};

// What a block holds of one KV head, in the order kSwizzled or as rows (CacheOrder).
template <class T, bool kSwizzled>
struct HeadRows {
  const T *keys, *values;
  int dim;
  __device__ HeadRows(const LayerCache& cache, int32_t block, int kv_head)
      : keys(keys_of_block<T>(cache, block, kv_head)),
        values(keys + value_distance(cache)),
        dim(cache.head_dim) {}
  __device__ int offset(int in_block, int d) const {
    return kSwizzled ? swizzled_offset(in_block, d) : in_block * dim + d;
  }
  __device__ float key(int in_block, int d) const { return cache_to_float(keys[offset(in_block, d)]); }
  __device__ float value(int in_block, int d) const { return cache_to_float(values[offset(in_block, d)]); }
};
template <bool kSwizzled>
struct HeadRows<Fp8Code, kSwizzled> {
  Fp8Head head;
  int dim;
  __device__ HeadRows(const LayerCache& cache, int32_t block, int kv_head)
      : head(fp8_head(cache, block, kv_head)), dim(cache.head_dim) {}
  __device__ float key(int in_block, int d) const {
    const int at = kSwizzled ? fp8_key_at(in_block, d) : in_block * dim + d;
    return fp8_value(head.keys[at]) * fp8_scale_of(head.scales[in_block]);
  }
  __device__ float value(int in_block, int d) const {
    const int at = kSwizzled ? fp8_value_at(in_block, d) : in_block * dim + d;
    return fp8_value(head.values[at]) * fp8_scale_of(head.scales[kBlockTokens + in_block]);
  }
};

// The block table of the sequence that a row belongs to, for one KV head.
__device__ inline const int32_t* table_of_row(const LayerCache& cache, int64_t row, int kv_head) {
  if (cache.head_tables != nullptr) return cache.head_tables[row * cache.kv_heads + kv_head];
  return cache.tables + cache.table_starts[cache.sequence_of[row]];
}
// The same where all heads have one.
__device__ inline const int32_t* table_of_row(const LayerCache& cache, int64_t row) {
  return cache.tables + cache.table_starts[cache.sequence_of[row]];
}

// Every instantiation: launch(T{}) for the element type of `type`.
template <class Launch>
void with_cache_type(DType type, Launch&& launch) {
  if (type == DType::kF16) {
    launch(__half{});
  } else if (type == DType::kBF16) {
    launch(__nv_bfloat16{});
  } else if (type == DType::kF8E4M3) {
    launch(Fp8Code{});
  } else {
    launch(float{});
  }
}

}  // namespace millrace::cuda
