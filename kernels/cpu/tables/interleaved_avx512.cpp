// For x86 with AVX-512 (F, BW, DQ, VL, VNNI, VBMI: Ice Lake's, Zen 4's) (simd/target.h).
#define MILLRACE_TARGET_AVX512
#include "kernels/cpu/tables/interleaved_kernels.h"
