// A lane's eight weights of a unit's word (quant/lowbit_units.h) as bf16, the A operand of a product of
// 16 x 16: w[0] row g columns 2t, 2t + 1; w[1] row g + 8; w[2], w[3] the same at columns + 8.
//
// Instructions for eight weights: 12 for e2m1 (rotations, masks, four products with the scale), 17 for INT4
// (masks; the zero is taken off exactly, and the f16 scale is multiplied as two bf16, whose products are
// added with one rounding).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/quant/lowbit_units.h"

namespace millrace::cuda {

namespace lowbit {

__device__ inline __nv_bfloat162 as_bf16(uint32_t v) { return *reinterpret_cast<const __nv_bfloat162*>(&v); }
__device__ inline uint32_t as_word(__nv_bfloat162 v) { return *reinterpret_cast<const uint32_t*>(&v); }
__device__ inline uint32_t multiply(uint32_t a, uint32_t b) {
  return as_word(__hmul2(as_bf16(a), as_bf16(b)));
}

__device__ inline uint32_t word_at(const uint8_t* unit, int step, int warp, int lane) {
  return reinterpret_cast<const uint32_t*>(unit)[step * 128 + warp * 32 + lane];
}
// The scales' bytes of rows g and g + 8 of group `group`.
__device__ inline uint32_t scale_bytes(const uint8_t* unit, int group, int warp, int lane) {
  return *reinterpret_cast<const uint16_t*>(unit + quant::kUnitCodeBytes + group * quant::kUnitRows +
                                            warp * 16 + lane / 4 * 2);
}
}  // namespace lowbit

// A step's weights of row group `warp`, in two parts, so that a caller can have all loads under way before it
// needs one; kUnscale: what sums have to be multiplied by.
template <mr_lowbit_format kFormat>
struct LowbitWeights {
  // Eight bits are a bf16, 2^-133 times what they are as a whole number: pairs 1 and 3, in bits 4 to 7, are
  // 16 times their codes, and so is the zero of their row.
  static constexpr float kUnscale = quant::kLowbitUnscale;
  static constexpr int kSteps = kFormat == MR_LOWBIT_INT4_128 ? quant::kUnitSteps : 2;  // of a scale
  struct Scale {
    __nv_bfloat162 high[2], low[2], zero[2];  // of rows g and g + 8
  };
  __device__ static Scale scale(const uint8_t* unit, int step, int warp, int lane) {
    const uint8_t* at = unit + quant::kUnitCodeBytes + step / kSteps * quant::kInt4GroupBytes;
    const __half2 scales = *reinterpret_cast<const __half2*>(at + (warp * 8 + lane / 4) * 4);
    const uint32_t zeros =
        *reinterpret_cast<const uint16_t*>(at + quant::kInt4ScaleBytes + (warp * 8 + lane / 4) * 2);
    Scale s;
    const float value[2] = {__low2float(scales) * 0x1p101f, __high2float(scales) * 0x1p97f};
    // A zero of 16 times 16 has the exponent after those of eight bits, and is right as well.
    const uint32_t zero[2] = {zeros & 255u, (zeros >> 8) * 16u};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      s.high[half] = __float2bfloat162_rn(value[half]);
      s.low[half] = __float2bfloat162_rn(value[half] - __low2float(s.high[half]));
      s.zero[half] = lowbit::as_bf16(zero[half] * 0x00010001u);
    }
    return s;
  }
  __device__ static void weights(uint32_t word, const Scale& s, uint32_t (&w)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = (i < 2 ? word : word >> 8) & (i % 2 == 0 ? 0x000f000fu : 0x00f000f0u);
      const __nv_bfloat162 c = __hsub2(lowbit::as_bf16(code), s.zero[i % 2]);
      w[i] = lowbit::as_word(__hfma2(c, s.high[i % 2], __hmul2(c, s.low[i % 2])));
    }
  }
  __device__ static void load(const uint8_t* unit, int step, int warp, int lane, uint32_t (&w)[4]) {
    weights(lowbit::word_at(unit, step, warp, lane), scale(unit, step, warp, lane), w);
  }
};
struct E2m1Scale {
  uint32_t low, high;  // bf16, twice, of rows g and g + 8
};
template <mr_lowbit_format kFormat, int kStepsOfScale, uint32_t kTwice, uint32_t kOffset>
struct E2m1Weights {
  static constexpr float kUnscale = quant::kLowbitUnscale;
  static constexpr int kSteps = kStepsOfScale;
  using Scale = E2m1Scale;
  __device__ static Scale scale(const uint8_t* unit, int step, int warp, int lane) {
    const uint32_t scales = lowbit::scale_bytes(unit, step / kSteps, warp, lane);
    return {(scales & 255u) * kTwice + kOffset, (scales >> 8) * kTwice + kOffset};
  }
  __device__ static void weights(uint32_t word, const Scale& s, uint32_t (&w)[4]) {
    w[0] = lowbit::multiply(quant::e2m1_pair(word, 0), s.low);
    w[1] = lowbit::multiply(quant::e2m1_pair(word, 1), s.high);
    w[2] = lowbit::multiply(quant::e2m1_pair(word, 2), s.low);
    w[3] = lowbit::multiply(quant::e2m1_pair(word, 3), s.high);
  }
  __device__ static void load(const uint8_t* unit, int step, int warp, int lane, uint32_t (&w)[4]) {
    weights(lowbit::word_at(unit, step, warp, lane), scale(unit, step, warp, lane), w);
  }
};
template <>
struct LowbitWeights<MR_LOWBIT_MXFP4> : E2m1Weights<MR_LOWBIT_MXFP4, 2, 0x00800080u, 0> {};  // e8m0_bits
template <>
struct LowbitWeights<MR_LOWBIT_NVFP4>
    : E2m1Weights<MR_LOWBIT_NVFP4, 1, 0x00100010u, quant::e4m3_scale_bits(0) * 0x00010001u> {};

}  // namespace millrace::cuda
