// MXFP4 weights (quant/packed_tiles.h) as bf16, exactly, and sums of their products with bf16 activations.
//
// The sum of a segment is a chain of tensor core products of 16 columns in float32, segments are added in
// order. Warp and warpgroup products give the same bits for the same chain, in whatever order the 16 columns
// come (tested on Hopper by same_bits_decode_test.cpp): that is what makes a row's result independent of the
// kernel that computed it.
#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/quant/packed_tiles.h"

namespace millrace::cuda {

__device__ inline uint32_t bf16_product(uint32_t a, uint32_t b) {
  const __nv_bfloat162 v =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ inline uint32_t bf16_pair(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// A stored scale as a bf16, twice.
__device__ inline uint32_t mxfp4_scale(uint32_t exponent) { return exponent * 0x00800080u; }

// A lane's eight elements of a block: words 0 and 1 belong to step 0, 2 and 3 to step 1.
__device__ inline uint4 mxfp4_weights(uint32_t w, uint32_t scale) {
  return {bf16_product(mxfp4_pair(w, 0), scale), bf16_product(mxfp4_pair(w, 1), scale),
          bf16_product(mxfp4_pair(w, 2), scale), bf16_product(mxfp4_pair(w, 3), scale)};
}

}  // namespace millrace::cuda
