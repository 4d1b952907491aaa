// For x86 with AVX-512 (F, BW, DQ, VL: Skylake's) (simd/target.h).
#define MILLRACE_TARGET_AVX512_BW
#include "kernels/cpu/tables/interleaved_kernels.h"
