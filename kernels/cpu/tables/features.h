// Which instruction sets this machine can run, and the kernel table to use: the best one, or the one that
// MILLRACE_ISA names.
//
// Names, best last: scalar; neon, neon_dotprod, neon_i8mm on ARM; avx2, avx_vnni, avx512_bw (F, BW, DQ, VL:
// Skylake), avx512_vnni (and VNNI: Cascade Lake), avx512 (and VBMI: Ice Lake, Zen 4), amx (avx512 with int8
// tiles) on x86.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu {

// The tables this machine can run, best last. Never empty.
const std::vector<const KernelTable*>& runnable_tables();

// The table of that name; "" is the best. Throws Error naming what this machine can run.
const KernelTable& choose_table(std::string_view isa);

// What MILLRACE_ISA says, "" when unset.
std::string wanted_isa();

}  // namespace millrace::cpu
