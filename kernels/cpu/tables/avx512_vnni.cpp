// Kernels for x86 with AVX-512 (F, BW, DQ, VL, VNNI: Cascade Lake's); compiled with their flags
// (simd/target.h).
#define MILLRACE_TARGET_AVX512_VNNI
#include "kernels/cpu/tables/instantiate_table.h"
#include "kernels/cpu/tables/isa_tables.h"

namespace millrace::cpu {

const KernelTable kAvx512VnniTable = avx512_vnni::make_avx512_table("avx512_vnni");

}  // namespace millrace::cpu
