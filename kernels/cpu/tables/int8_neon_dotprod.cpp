// For ARMv8.2 with the dot product instruction (simd/target.h).
#define MILLRACE_TARGET_NEON_DOTPROD
#include "kernels/cpu/tables/int8_kernels.h"
