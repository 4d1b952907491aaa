// For x86 with AVX2, FMA and F16C (simd/target.h).
#define MILLRACE_TARGET_AVX2
#include "kernels/cpu/tables/interleaved_kernels.h"
