// For x86 with AVX2 and the 256-bit vpdpbusd (simd/target.h).
#define MILLRACE_TARGET_AVX_VNNI
#include "kernels/cpu/tables/interleaved_kernels.h"
