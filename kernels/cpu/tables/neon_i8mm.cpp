// Kernels for ARMv8.2 with the dot product and the int8 matrix instructions; compiled with
// -march=armv8.2-a+dotprod+i8mm (simd/target.h).
#define MILLRACE_TARGET_NEON_I8MM
#include "kernels/cpu/matmul/gemv_interleaved_neon.h"
#include "kernels/cpu/tables/instantiate_table.h"
#include "kernels/cpu/tables/isa_tables.h"

namespace millrace::cpu {

const KernelTable kNeonI8mmTable = neon_i8mm::with_interleaved(neon_i8mm::make_table("neon_i8mm"));

}  // namespace millrace::cpu
