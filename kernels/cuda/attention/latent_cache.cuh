// How the kernels of latent attention address a latent pool (latent.h).
#pragma once

#include "kernels/cuda/attention/kv_cache.cuh"
#include "kernels/cuda/attention/latent.h"

namespace millrace::cuda {

inline constexpr int kLatentScaleBytes = kBlockTokens;  // of fp8, before the codes of a block

// One layer's keys of one block, with elements of T in the order kSwizzled or as rows.
template <class T, bool kSwizzled>
struct LatentBlock {
  T* keys;
  int dim;
  __device__ LatentBlock(const LayerCache& cache, int32_t block)
      : keys(keys_of_block<T>(cache, block, 0)), dim(cache.head_dim) {}
  __device__ int offset(int in_block, int d) const {
    return kSwizzled ? swizzled_offset(in_block, d) : in_block * dim + d;
  }
  __device__ float at(int in_block, int d) const { return cache_to_float(keys[offset(in_block, d)]); }
};
template <bool kSwizzled>
struct LatentBlock<Fp8Code, kSwizzled> {
  uint8_t *scales, *codes;
  int dim;
  __device__ LatentBlock(const LayerCache& cache, int32_t block)
      : scales(static_cast<uint8_t*>(cache.pool) + block * cache.block_elements + cache.layer_offset),
        codes(scales + kLatentScaleBytes),
        dim(cache.head_dim) {}
  __device__ float at(int in_block, int d) const {
    return fp8_value(codes[in_block * dim + d]) * fp8_scale_of(scales[in_block]);
  }
};

}  // namespace millrace::cuda
