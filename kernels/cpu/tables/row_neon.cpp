// For base ARMv8 (simd/target.h).
#define MILLRACE_TARGET_NEON
#include "kernels/cpu/tables/row_kernels.h"
