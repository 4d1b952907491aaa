// A cache of e4m3 codes with a power of two per token and head (backend/kv_types.h has the rule): how a head
// lies in a block, and how codes become bf16 in registers.
//
// Keys of a head in a block: [16] scales of its keys, [16] of its values, [16 x dim] codes; values: [16 x
// dim] codes. Both scales come with the keys, since weights are scaled before the values are looked at. For
// the tensor cores (CacheOrder::kSwizzled), in parts of 64 dimensions:
//   keys    16 rows of 64 bytes, dimension 16s + 4t + j at byte 16t + 4s + j: the 16 bytes of lane (g, t) are
//           its share of four products of 16 dimensions
//   values  8 rows of 128 bytes, one per pair of positions, a dimension's two codes side by side, chunks of
//           16 bytes exchanged by chunk ^ row: ldmatrix, which transposes pairs of bytes, gives a lane the
//           codes of four positions of one dimension
// In which order 16 columns of a product are taken makes no difference to its sum (docs/kernels/
// cuda_decode.md, "The numbers"), so neither order changes a bit.
#pragma once

#include <cuda_fp8.h>

#include "base/paging.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/quant/mxfp4.cuh"
#include "kernels/quant/kv_types.h"
#include "millrace/kernels/tile/ptx/permute.cuh"

namespace millrace::cuda {

inline constexpr int kFp8ScalesBytes = 2 * kBlockTokens;  // of a head's keys and values
inline constexpr int kFp8PartDims = 64, kFp8PartBytes = kBlockTokens * kFp8PartDims;

constexpr int fp8_key_bytes(int dim) { return kFp8ScalesBytes + kBlockTokens * dim; }
constexpr int fp8_value_bytes(int dim) { return kBlockTokens * dim; }

// Where the code of dimension d at place `in_block` lies, behind the scales.
constexpr int fp8_key_at(int in_block, int d) {
  return d / kFp8PartDims * kFp8PartBytes + in_block * kFp8PartDims + d % 16 / 4 * 16 +
         d % kFp8PartDims / 16 * 4 + d % 4;
}
constexpr int fp8_value_at(int in_block, int d) {
  const int pair = in_block / 2;
  return d / kFp8PartDims * kFp8PartBytes + pair * 128 + ((d % kFp8PartDims / 8) ^ pair) * 16 + d % 8 * 2 +
         in_block % 2;
}

// A head in one block. Codes are [16][dim] in CacheOrder::kRows.
struct Fp8Head {
  uint8_t *scales, *keys, *values;
};
__device__ inline Fp8Head fp8_head(const LayerCache& cache, int32_t block, int kv_head) {
  uint8_t* layer = static_cast<uint8_t*>(cache.pool) + block * cache.block_elements + cache.layer_offset;
  uint8_t* keys = layer + static_cast<int64_t>(kv_head) * fp8_key_bytes(cache.head_dim);
  uint8_t* values = layer + static_cast<int64_t>(cache.kv_heads) * fp8_key_bytes(cache.head_dim) +
                    static_cast<int64_t>(kv_head) * fp8_value_bytes(cache.head_dim);
  return {keys, keys + kFp8ScalesBytes, values};
}

__device__ inline float fp8_scale_of(uint32_t bits) { return __uint_as_float(bits << 23); }

// A head's scale from the largest magnitude that this lane has seen; for all lanes of the warp.
__device__ inline uint8_t fp8_scale_of_warp(uint32_t largest) {
  return fp8_scale_bits(__reduce_max_sync(0xffffffffu, largest));
}
__device__ inline uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ inline uint8_t fp8_code(float x, uint8_t scale) {
  if (scale == kFp8NotFinite) return 0;
  return __nv_cvt_float_to_fp8(x * __uint_as_float(fp8_inverse_scale(scale)), __NV_SATFINITE, __NV_E4M3);
}
__device__ inline float fp8_value(uint8_t code) {
  const float magnitude = __uint_as_float((code & 0x7fu) << 20) * 0x1p120f;
  return (code & 0x80u) != 0 ? -magnitude : magnitude;
}

// Two codes of a word as the bits of two bf16 numbers too small by 2^120, the exponents' difference: with
// the same fields at the same distances, subnormal codes are subnormal bf16 numbers. kPair: the bytes of the
// low and the high number, 0x1800 for 0 and 1; the byte between them holds the sign of the low one, eight
// times, so that one arithmetic shift brings both signs into place.
inline constexpr uint32_t kCodes01 = 0x1800, kCodes23 = 0x3a22, kCodes02 = 0x2800, kCodes13 = 0x3911;
inline constexpr uint32_t kTwoTo120 = 0x7b807b80;  // twice, as bf16

__host__ __device__ inline uint32_t spread_codes(uint32_t permuted) {
  return static_cast<uint32_t>(static_cast<int32_t>(permuted) >> 4) & 0x87f087f0u;
}
// And times a power of two of each: exact.
template <uint32_t kPair>
__device__ inline uint32_t codes_to_bf16(uint32_t word, uint32_t factors = kTwoTo120) {
  return bf16_product(spread_codes(ptx::permute(word, 0u, kPair)), factors);
}
// 2^120 times a scale as bf16 bits; infinite for kFp8NotFinite, which makes the zero codes NaN.
__host__ __device__ inline uint32_t fp8_factor(uint32_t scale) {
  return (scale + 120u < 255u ? scale + 120u : 255u) << 7;
}

}  // namespace millrace::cuda
