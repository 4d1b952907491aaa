// The encoders in plain C++ (simd/target.h).
#include "kernels/cpu/quant/encode_table.h"
#include "kernels/cpu/quant/instantiate_encode_table.h"

namespace millrace::quant {

constinit const EncodeTable kScalarEncoders = scalar::make_table("scalar");

}  // namespace millrace::quant
