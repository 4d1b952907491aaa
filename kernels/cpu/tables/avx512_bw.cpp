// Kernels for x86 with AVX-512 (F, BW, DQ, VL: Skylake's); compiled with their flags (simd/target.h).
#define MILLRACE_TARGET_AVX512_BW
#include "kernels/cpu/tables/instantiate_table.h"
#include "kernels/cpu/tables/isa_tables.h"

namespace millrace::cpu {

const KernelTable kAvx512BwTable = avx512_bw::make_avx512_table("avx512_bw");

}  // namespace millrace::cpu
