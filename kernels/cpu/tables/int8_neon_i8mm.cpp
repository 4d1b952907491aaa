// For ARMv8.2 with the dot product and the int8 matrix instructions (simd/target.h).
#define MILLRACE_TARGET_NEON_I8MM
#include "kernels/cpu/tables/int8_kernels.h"
