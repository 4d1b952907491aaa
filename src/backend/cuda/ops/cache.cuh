// A layer's paged keys and values as the rope and attention kernels address them, for each type they are kept
// in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backend/cuda/ops/ops.h"
#include "base/paging.h"

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

// Where element `d` of the key or value at place `in_block` of a block lies.
__device__ inline int cache_offset(const LayerCache& cache, int in_block, int d) {
  if (cache.order == CacheOrder::kRows) return in_block * cache.head_dim + d;
  return d / 64 * (kBlockTokens * 64) + in_block * 64 + ((d % 64) ^ (in_block % 8 * 8));
}

// The block table of the sequence that a row belongs to.
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
  } else {
    launch(float{});
  }
}

}  // namespace millrace::cuda
