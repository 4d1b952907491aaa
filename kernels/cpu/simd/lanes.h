// The vector type of the quantizers for this translation unit's instruction set (target.h): struct Lanes,
// whose lanes are blocks. lanes_scalar.h says what each operation means.
#pragma once

#include "kernels/cpu/simd/target.h"
#if defined(MILLRACE_SIMD_AVX512)
#error "the quantizers have no lanes for AVX-512: AVX2's are theirs"
#endif
#if defined(MILLRACE_SIMD_AVX2)
#include "kernels/cpu/simd/lanes_avx2.h"
#elif defined(MILLRACE_SIMD_NEON)
#include "kernels/cpu/simd/lanes_neon.h"
#elif defined(MILLRACE_SIMD_SCALAR)
#include "kernels/cpu/simd/lanes_scalar.h"
#endif
