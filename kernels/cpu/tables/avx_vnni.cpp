// Kernels for x86 with AVX2 and the 256-bit vpdpbusd; compiled with their flags (simd/target.h).
#define MILLRACE_TARGET_AVX_VNNI
#include "kernels/cpu/tables/instantiate_table.h"
#include "kernels/cpu/tables/isa_tables.h"

namespace millrace::cpu {

const KernelTable kAvxVnniTable = avx_vnni::make_x86_table("avx_vnni");

}  // namespace millrace::cpu
