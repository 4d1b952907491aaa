// The vector type of this translation unit's instruction set (target.h): struct Simd, sixteen float lanes,
// and what it multiplies int8 with. All kernels are written against it; scalar.h says what each operation
// means.
#pragma once

#include "kernels/cpu/simd/target.h"
#if defined(MILLRACE_SIMD_AVX512)
#include "kernels/cpu/simd/avx512.h"
#elif defined(MILLRACE_SIMD_AVX2)
#include "kernels/cpu/simd/avx2.h"
#elif defined(MILLRACE_SIMD_NEON)
#include "kernels/cpu/simd/neon.h"
#else
#include "kernels/cpu/simd/scalar.h"
#endif

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

using V16 = Simd::V16;

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
