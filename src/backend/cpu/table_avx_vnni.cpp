// Kernels for x86 with AVX2 and the 256-bit form of VNNI: those of table_avx2.cpp with one instruction in
// place of three for four products. Everything is in the anonymous namespace and no STL is used: an inline
// function compiled with these flags must not be picked by the linker for other files.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/cpu/kernel_table.h"
#include "backend/cpu/tables.h"
#include "quant/blocks.h"

namespace millrace::cpu {
namespace {

// Bare comments keep clang-format from sorting what must stay in order.
#include "backend/cpu/simd_avx2.h"
//
#include "backend/cpu/kernels_unroll.h"
//
#include "backend/cpu/kernels_formats.h"
//
#include "backend/cpu/kernels_quantized.h"
//
#include "backend/cpu/kernels_float.h"
//
#include "backend/cpu/kernels_attention.h"
//
#include "backend/cpu/kernels_table.h"

}  // namespace

const KernelTable kAvxVnniTable = make_table("avx_vnni");

}  // namespace millrace::cpu
