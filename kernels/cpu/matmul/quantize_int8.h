// Activations to int8 blocks of 32 with a scale each, what block-quantized weights are multiplied with.
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

void quantize_int8(const float* x, int64_t cols, ActivationBlock* out) {
  for (int64_t b = 0; b < cols / kQuantBlock; ++b, x += kQuantBlock) {
    const V16 lo = Simd::load(x), hi = Simd::load(x + kLanes);
    const float amax = Simd::reduce_max(Simd::max(Simd::abs(lo), Simd::abs(hi)));
    // Below 1e-36 the inverse overflows, and below 3e-36 half the scale is subnormal, which would make
    // (d / 2) * scale and d * (scale / 2) different: such a block is zero.
    const bool zero = amax < 1e-35f;
    const V16 inverse = Simd::broadcast(zero ? 0.0f : 127.0f / amax);
    out[b].scale = zero ? 0.0f : amax / 127.0f;
    const int32_t first = Simd::round_to_int8(Simd::mul(lo, inverse), out[b].q);
    out[b].sum = first + Simd::round_to_int8(Simd::mul(hi, inverse), out[b].q + kLanes);
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
