// Products with four-bit weights in units (millrace/kernels/lowbit.h, lowbit_task.h) over the device's
// threads.
#pragma once

#include "kernels/cpu/context.h"
#include "millrace/kernels/lowbit.h"

namespace millrace::cpu {

void lowbit_repack(const Context& on, const mr_lowbit_matrix& matrix, void* to);
size_t lowbit_gemm_workspace_bytes(const mr_lowbit_gemm_args& args, int threads);
// The arguments were checked, strides of 0 replaced.
void lowbit_gemm(const Context& on, const mr_lowbit_gemm_args& args, void* workspace);

}  // namespace millrace::cpu
