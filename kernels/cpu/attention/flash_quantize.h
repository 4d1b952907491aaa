// Rows of q, k and v to FP8 codes and scales, as millrace/kernels/flash_attention.h lays them out.
#pragma once

#include "kernels/cpu/context.h"
#include "millrace/kernels/flash_attention.h"

namespace millrace::cpu {

void flash_quantize(const Context& ctx, const mr_flash_quantize_args& args);

}  // namespace millrace::cpu
