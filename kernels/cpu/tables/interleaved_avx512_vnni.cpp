// For x86 with AVX-512 (F, BW, DQ, VL, VNNI: Cascade Lake's) (simd/target.h).
#define MILLRACE_TARGET_AVX512_VNNI
#include "kernels/cpu/tables/interleaved_kernels.h"
