// The tables this build has. Which of them a machine can run is features.h's business: a table may be asked
// for only where its instructions are.
#pragma once

#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu {

const KernelTable& scalar_table();
#if defined(__aarch64__)
const KernelTable& neon_table();
const KernelTable& neon_dotprod_table();
const KernelTable& neon_i8mm_table();
#elif defined(__x86_64__)
const KernelTable& avx2_table();
const KernelTable& avx_vnni_table();
const KernelTable& avx512_bw_table();
const KernelTable& avx512_vnni_table();
const KernelTable& avx512_table();
const KernelTable& amx_table();
#endif

}  // namespace millrace::cpu
