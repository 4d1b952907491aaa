// For base ARMv8 (simd/target.h).
#define MILLRACE_TARGET_NEON
#include "kernels/cpu/tables/paged_kernels.h"
