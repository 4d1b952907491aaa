// The encoders with the dot product of ARMv8.2 (simd/target.h).
#define MILLRACE_TARGET_NEON_DOTPROD
#include "kernels/cpu/quant/encode_table.h"
#include "kernels/cpu/quant/instantiate_encode_table.h"

namespace millrace::quant {

constinit const EncodeTable kNeonDotprodEncoders = neon_dotprod::make_table("neon_dotprod");

}  // namespace millrace::quant
