// A lane's eight weights of a unit's word (quant/lowbit_units.h) as bf16, the A operand of a product of
// 16 x 16: w[0] row g columns 2t, 2t + 1; w[1] row g + 8; w[2], w[3] the same at columns + 8.
//
// Instructions for eight weights: 12 for e2m1 (rotations, masks, four products with the scale), 19 for INT4
// (the code becomes 128 + code by its bits, the zero is taken off exactly, and the f16 scale is multiplied as
// two bf16, whose products are added with one rounding).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/ptx/permute.cuh"
#include "kernels/quant/lowbit_units.h"

namespace millrace::cuda {

namespace lowbit {

__device__ inline __nv_bfloat162 as_bf16(uint32_t v) { return *reinterpret_cast<const __nv_bfloat162*>(&v); }
__device__ inline uint32_t as_word(__nv_bfloat162 v) { return *reinterpret_cast<const uint32_t*>(&v); }
__device__ inline uint32_t multiply(uint32_t a, uint32_t b) { return as_word(__hmul2(as_bf16(a), as_bf16(b))); }

__device__ inline uint32_t word_at(const uint8_t* unit, int step, int warp, int lane) {
  return reinterpret_cast<const uint32_t*>(unit)[step * 128 + warp * 32 + lane];
}
// The scales' bytes of rows g and g + 8 of group `group`.
__device__ inline uint32_t scale_bytes(const uint8_t* unit, int group, int warp, int lane) {
  return *reinterpret_cast<const uint16_t*>(unit + quant::kUnitCodeBytes + group * quant::kUnitRows +
                                            warp * 16 + lane / 4 * 2);
}
__device__ inline void e2m1_weights(uint32_t word, uint32_t low, uint32_t high, uint32_t (&w)[4]) {
  w[0] = multiply(quant::e2m1_pair(word, 0), low);
  w[1] = multiply(quant::e2m1_pair(word, 1), high);
  w[2] = multiply(quant::e2m1_pair(word, 2), low);
  w[3] = multiply(quant::e2m1_pair(word, 3), high);
}

}  // namespace lowbit

// load: the weights of step `step` of row group `warp`; kUnscale: what sums have to be multiplied by.
template <mr_lowbit_format kFormat>
struct LowbitWeights {
  static constexpr float kUnscale = 1.0f;
  __device__ static void load(const uint8_t* unit, int step, int warp, int lane, uint32_t (&w)[4]) {
    constexpr uint32_t k128 = 0x43004300u;  // bf16 128, twice: its last bit is one
    const int group = kFormat == MR_LOWBIT_INT4_128 ? 0 : step / 2;
    const uint8_t* at = unit + quant::kUnitCodeBytes + group * quant::kInt4GroupBytes;
    const __half2 scales = *reinterpret_cast<const __half2*>(at + (warp * 8 + lane / 4) * 4);
    const uint32_t zeros =
        *reinterpret_cast<const uint16_t*>(at + quant::kInt4ScaleBytes + (warp * 8 + lane / 4) * 2);
    const float scale[2] = {__low2float(scales), __high2float(scales)};
    const uint32_t zero[2] = {ptx::permute(zeros, 0u, 0x4040u) | k128, ptx::permute(zeros, 0u, 0x4141u) | k128};
    const uint32_t word = lowbit::word_at(unit, step, warp, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const __nv_bfloat162 high = __float2bfloat162_rn(scale[half]);
      const __nv_bfloat162 low = __float2bfloat162_rn(scale[half] - __low2float(high));
#pragma unroll
      for (int i = half; i < 4; i += 2) {
        const uint32_t code = (word >> (4 * i) & 0x000f000fu) | k128;
        const __nv_bfloat162 c = __hsub2(lowbit::as_bf16(code), lowbit::as_bf16(zero[half]));
        w[i] = lowbit::as_word(__hfma2(c, high, __hmul2(c, low)));
      }
    }
  }
};
template <>
struct LowbitWeights<MR_LOWBIT_MXFP4> {
  static constexpr float kUnscale = quant::kE2m1Unscale;
  __device__ static void load(const uint8_t* unit, int step, int warp, int lane, uint32_t (&w)[4]) {
    const uint32_t scales = lowbit::scale_bytes(unit, step / 2, warp, lane);
    constexpr uint32_t kTwice = 0x00800080u;  // e8m0_bits
    lowbit::e2m1_weights(lowbit::word_at(unit, step, warp, lane), (scales & 255u) * kTwice,
                         (scales >> 8) * kTwice, w);
  }
};
template <>
struct LowbitWeights<MR_LOWBIT_NVFP4> {
  static constexpr float kUnscale = quant::kE2m1Unscale;
  __device__ static void load(const uint8_t* unit, int step, int warp, int lane, uint32_t (&w)[4]) {
    const uint32_t scales = lowbit::scale_bytes(unit, step, warp, lane);
    constexpr uint32_t kTwice = 0x00100010u, kOffset = quant::e4m3_scale_bits(0) * 0x00010001u;
    lowbit::e2m1_weights(lowbit::word_at(unit, step, warp, lane), (scales & 255u) * kTwice + kOffset,
                         (scales >> 8) * kTwice + kOffset, w);
  }
};

}  // namespace millrace::cuda
