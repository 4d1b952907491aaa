// The encoders with AVX2, FMA and F16C; compiled with their flags (simd/target.h).
#define MILLRACE_TARGET_AVX2
#include "kernels/cpu/quant/encode_table.h"
#include "kernels/cpu/quant/instantiate_encode_table.h"

namespace millrace::quant {

constinit const EncodeTable kAvx2Encoders = avx2::make_table("avx2");

}  // namespace millrace::quant
