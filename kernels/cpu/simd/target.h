// Which instruction set the kernels of a translation unit are compiled for. A .cpp file of tables/ defines
// one of MILLRACE_TARGET_* before its first include and is compiled with that set's flags; with none of them
// the headers are plain C++, so that each compiles alone.
//
// Every kernel header opens namespace millrace::cpu::MILLRACE_TARGET (scalar, neon, avx512 ...) and in it an
// anonymous one. So no two instruction sets share a name that the linker could confuse, and what a table does
// not use or has inlined leaves no code behind. For the same reason these headers include no STL templates:
// an inline function compiled with a table's flags must not be picked by the linker for other files.
#pragma once

// MILLRACE_SIMD_*: the family whose vector type is used. MILLRACE_HAS_*: instructions beyond it.
#if defined(MILLRACE_TARGET_AVX512)
#define MILLRACE_TARGET avx512
#define MILLRACE_SIMD_AVX512
#define MILLRACE_HAS_AVX512_VNNI
#define MILLRACE_HAS_AVX512_VBMI
#elif defined(MILLRACE_TARGET_AVX512_VNNI)
#define MILLRACE_TARGET avx512_vnni
#define MILLRACE_SIMD_AVX512
#define MILLRACE_HAS_AVX512_VNNI
#elif defined(MILLRACE_TARGET_AVX512_BW)
#define MILLRACE_TARGET avx512_bw
#define MILLRACE_SIMD_AVX512
#elif defined(MILLRACE_TARGET_AVX_VNNI)
#define MILLRACE_TARGET avx_vnni
#define MILLRACE_SIMD_AVX2
#define MILLRACE_HAS_AVX_VNNI
#elif defined(MILLRACE_TARGET_AVX2)
#define MILLRACE_TARGET avx2
#define MILLRACE_SIMD_AVX2
#elif defined(MILLRACE_TARGET_NEON_I8MM)
#define MILLRACE_TARGET neon_i8mm
#define MILLRACE_SIMD_NEON
#define MILLRACE_HAS_DOTPROD
#define MILLRACE_HAS_I8MM
#elif defined(MILLRACE_TARGET_NEON_DOTPROD)
#define MILLRACE_TARGET neon_dotprod
#define MILLRACE_SIMD_NEON
#define MILLRACE_HAS_DOTPROD
#elif defined(MILLRACE_TARGET_NEON)
#define MILLRACE_TARGET neon
#define MILLRACE_SIMD_NEON
#else
#define MILLRACE_TARGET scalar
#define MILLRACE_SIMD_SCALAR
#endif
#if defined(MILLRACE_SIMD_AVX2) || defined(MILLRACE_SIMD_AVX512)
#define MILLRACE_SIMD_X86
#endif
