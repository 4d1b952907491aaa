// Kernels for x86 with AVX2 and the 256-bit form of VNNI: those of table_avx2.cpp with one instruction in
// place of three for four products. Everything is in the anonymous namespace and no STL is used: an inline
// function compiled with these flags must not be picked by the linker for other files.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/tables/isa_tables.h"
#include "kernels/cpu/tables/kernel_table.h"
#include "kernels/quant/blocks.h"

namespace millrace::cpu {
namespace {

// Bare comments keep clang-format from sorting what must stay in order.
#include "kernels/cpu/simd/avx2.h"
//
#include "kernels/cpu/simd/unroll.h"
//
#include "kernels/cpu/matmul/formats.h"
//
#include "kernels/cpu/matmul/quantized.h"
//
#include "kernels/cpu/matmul/float.h"
//
#include "kernels/cpu/attention/paged.h"
//
#include "kernels/cpu/tables/instantiate.h"

}  // namespace

const KernelTable kAvxVnniTable = make_table("avx_vnni");

}  // namespace millrace::cpu
