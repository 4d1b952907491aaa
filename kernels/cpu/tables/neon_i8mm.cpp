// Kernels for ARMv8.2 with the dot product and the int8 matrix instructions; compiled with
// -march=armv8.2-a+dotprod+i8mm. Everything is
// in the anonymous namespace and no STL is used: an inline function compiled with these flags must not be
// picked by the linker for other files.
#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/tables/isa_tables.h"
#include "kernels/cpu/tables/kernel_table.h"
#include "kernels/quant/blocks.h"

namespace millrace::cpu {
namespace {

// Bare comments keep clang-format from sorting what must stay in order.
#include "kernels/cpu/simd/unroll.h"
//
#include "kernels/cpu/simd/neon.h"
//
#include "kernels/cpu/matmul/formats.h"
//
#include "kernels/cpu/matmul/tile_neon.h"
//
#include "kernels/cpu/matmul/gemv_mxfp4_neon.h"
//
#include "kernels/cpu/matmul/quantized_neon.h"
//
#include "kernels/cpu/matmul/interleaved_neon.h"
//
#include "kernels/cpu/matmul/float.h"
//
#include "kernels/cpu/attention/paged.h"
//
#include "kernels/cpu/tables/instantiate.h"

}  // namespace

const KernelTable kNeonI8mmTable = with_packed(make_table("neon_i8mm"));

}  // namespace millrace::cpu
