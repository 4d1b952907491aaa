// Kernels for x86 with AVX2, FMA and F16C; compiled with their flags (simd/target.h).
#define MILLRACE_TARGET_AVX2
#include "kernels/cpu/tables/instantiate_table.h"
#include "kernels/cpu/tables/isa_tables.h"

namespace millrace::cpu {

const KernelTable kAvx2Table = avx2::make_x86_table("avx2");

}  // namespace millrace::cpu
