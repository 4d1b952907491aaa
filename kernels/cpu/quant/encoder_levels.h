// Encoders of super-blocks with signed integer scales over even (Q3_K) or uneven levels (IQ4_XS), and of
// NVFP4.
#pragma once

#include "kernels/cpu/quant/encoder_k.h"

namespace millrace::quant {

void encode_q3_k(const BlockRun& run, BlockQ3_K& out);
void encode_iq4_xs(const BlockRun& run, BlockIQ4_XS& out);
void encode_nvfp4(const BlockRun& run, BlockNVFP4& out);

}  // namespace millrace::quant
