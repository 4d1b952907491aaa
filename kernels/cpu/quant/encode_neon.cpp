// The encoders for base ARMv8 (simd/target.h).
#define MILLRACE_TARGET_NEON
#include "kernels/cpu/quant/encode_table.h"
#include "kernels/cpu/quant/instantiate_encode_table.h"

namespace millrace::quant {

constinit const EncodeTable kNeonEncoders = neon::make_table("neon");

}  // namespace millrace::quant
