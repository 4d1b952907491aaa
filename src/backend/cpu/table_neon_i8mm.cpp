// Kernels for ARMv8.2 with the dot product and the int8 matrix instructions; compiled with
// -march=armv8.2-a+dotprod+i8mm. Everything is
// in the anonymous namespace and no STL is used: an inline function compiled with these flags must not be
// picked by the linker for other files.
#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/cpu/kernel_table.h"
#include "backend/cpu/tables.h"
#include "quant/blocks.h"

namespace millrace::cpu {
namespace {

// Bare comments keep clang-format from sorting what must stay in order.
#include "backend/cpu/kernels_unroll.h"
//
#include "backend/cpu/simd_neon.h"
//
#include "backend/cpu/kernels_formats.h"
//
#include "backend/cpu/kernels_tile_neon.h"
//
#include "backend/cpu/kernels_stream_mx4_neon.h"
//
#include "backend/cpu/kernels_quantized_neon.h"
//
#include "backend/cpu/kernels_packed_neon.h"
//
#include "backend/cpu/kernels_float.h"
//
#include "backend/cpu/kernels_attention.h"
//
#include "backend/cpu/kernels_table.h"

}  // namespace

const KernelTable kNeonI8mmTable = with_packed(make_table("neon_i8mm"));

}  // namespace millrace::cpu
