// Kernels for ARMv8.2 with the dot product instruction; compiled with -march=armv8.2-a+dotprod
// (simd/target.h).
#define MILLRACE_TARGET_NEON_DOTPROD
#include "kernels/cpu/matmul/gemv_interleaved_neon.h"
#include "kernels/cpu/tables/instantiate_table.h"
#include "kernels/cpu/tables/isa_tables.h"

namespace millrace::cpu {

const KernelTable kNeonDotprodTable =
    neon_dotprod::with_interleaved(neon_dotprod::make_table("neon_dotprod"));

}  // namespace millrace::cpu
