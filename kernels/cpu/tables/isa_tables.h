// The tables this build has. Which of them a machine can run is features.h's business.
#pragma once

#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu {

extern const KernelTable kScalarTable;
extern const KernelTable kNeonTable;         // ARM builds
extern const KernelTable kNeonDotprodTable;  // ARM builds
extern const KernelTable kNeonI8mmTable;     // ARM builds
extern const KernelTable kAvx2Table;         // x86 builds
extern const KernelTable kAvxVnniTable;      // x86 builds
extern const KernelTable kAvx512BwTable;     // x86 builds
extern const KernelTable kAvx512VnniTable;   // x86 builds
extern const KernelTable kAvx512Table;       // x86 builds
extern const KernelTable kAmxTable;          // x86 builds

}  // namespace millrace::cpu
