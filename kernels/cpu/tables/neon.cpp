// Kernels for base ARMv8 (simd/target.h).
#define MILLRACE_TARGET_NEON
#include "kernels/cpu/tables/instantiate_table.h"
#include "kernels/cpu/tables/isa_tables.h"

namespace millrace::cpu {

const KernelTable kNeonTable = neon::make_table("neon");

}  // namespace millrace::cpu
