// Attention over tensors on mma.sync: the member of the family for every GPU from sm_75 on, every layout,
// mask and head size (multiples of 8 up to 256, padded in shared memory). FP16; from sm_80 on BF16, float32
// (products by FMA: a fraction of the speed, and float32's precision) and, forward only, E4M3 by way of bf16,
// which holds its codes exactly. The problem was checked, its scale is not 0.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "millrace/kernels/flash_attention.h"

namespace millrace::cuda {

// code_architecture: of the code that runs on the device, 75 for sm_75 (Device::code_architecture).
bool supports_flash_mma(const mr_flash_problem& problem, int code_architecture);
bool supports_flash_backward_mma(const mr_flash_problem& problem, int code_architecture);

// Forward needs no workspace. lse may be null.
void launch_flash_forward_mma(const mr_flash_problem& problem, const mr_flash_tensor& q,
                              const mr_flash_tensor& k, const mr_flash_tensor& v, const mr_flash_tensor& out,
                              float* lse, cudaStream_t stream);

// x to codes and scales, as the CPU rounds them.
void launch_flash_quantize(const mr_flash_quantize_args& args, cudaStream_t stream);

// Backward: every sum in a fixed order, one pass for dK and dV and one for dQ, whatever
// gradients.deterministic says. The workspace holds one float a row.
size_t flash_backward_mma_workspace(const mr_flash_problem& problem);
void launch_flash_backward_mma(const mr_flash_problem& problem, const mr_flash_tensor& q,
                               const mr_flash_tensor& k, const mr_flash_tensor& v, const mr_flash_tensor& out,
                               const float* lse, const mr_flash_gradients& gradients, void* workspace,
                               cudaStream_t stream);

}  // namespace millrace::cuda
