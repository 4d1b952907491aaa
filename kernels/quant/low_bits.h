// One block of the types below four bits, of the levels that are not even, and of NVFP4 to float32. Every
// value is a product that float32 holds, but Q2_K's, which are rounded once.
#pragma once

#include <span>

#include "kernels/quant/blocks.h"
#include "tensor/dtype.h"

namespace millrace::quant {

void decode(const BlockQ2_K& b, float* out);
void decode(const BlockQ3_K& b, float* out);
void decode(const BlockIQ4_NL& b, float* out);
void decode(const BlockIQ4_XS& b, float* out);
void decode(const BlockIQ3_XXS& b, float* out);
void decode(const BlockIQ3_S& b, float* out);
void decode(const BlockIQ2_XXS& b, float* out);
void decode(const BlockIQ2_XS& b, float* out);
void decode(const BlockIQ2_S& b, float* out);
void decode(const BlockIQ1_S& b, float* out);
void decode(const BlockIQ1_M& b, float* out);
void decode(const BlockTQ1_0& b, float* out);
void decode(const BlockTQ2_0& b, float* out);
void decode(const BlockNVFP4& b, float* out);

// The codebook of an IQ type as one run of entries of eight, or of four (IQ3); empty for a type without.
std::span<const int8_t> codebook_of(DType type);

// The f16 scale of an IQ1_M block, which lies in four pieces.
constexpr uint16_t scale_bits(const BlockIQ1_M& b) {
  return static_cast<uint16_t>(b.scales[0] >> 12 | (b.scales[1] >> 12) << 4 | (b.scales[2] >> 12) << 8 |
                               (b.scales[3] >> 12) << 12);
}

}  // namespace millrace::quant
