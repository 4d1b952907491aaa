// Products of two matrices of e2m1 codes with block scales (millrace/kernels/fp4_gemm.h) over the device's
// threads.
#pragma once

#include "kernels/cpu/context.h"
#include "millrace/kernels/fp4_gemm.h"

namespace millrace::cpu {

size_t fp4_gemm_workspace_bytes(int threads);
// The arguments were checked, strides of 0 replaced.
void fp4_gemm(const Context& on, const mr_fp4_gemm_args& args, void* workspace);

}  // namespace millrace::cpu
