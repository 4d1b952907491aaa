// Attention over tensors (include/millrace/kernels/flash_attention.h) on a GPU: what launches. The problem
// was checked and its scale is not 0; a workspace is as large as asked for here and 256-byte aligned.
#pragma once

#include <cstddef>

#include "kernels/cuda/device.h"
#include "millrace/kernels/flash_attention.h"

namespace millrace::cuda {

// Why there is no kernel for this on the device, with what would work; null where there is one.
const char* flash_forward_lacks(const mr_flash_problem& problem, const Device& device);
const char* flash_backward_lacks(const mr_flash_problem& problem, const Device& device);

size_t flash_forward_workspace(const mr_flash_problem& problem, const Device& device);
void launch_flash_forward(const mr_flash_problem& problem, const mr_flash_tensor& q, const mr_flash_tensor& k,
                          const mr_flash_tensor& v, const mr_flash_tensor& out, float* lse, void* workspace,
                          const Launch& at);

size_t flash_backward_workspace(const mr_flash_problem& problem, bool deterministic, const Device& device);
void launch_flash_backward(const mr_flash_problem& problem, const mr_flash_tensor& q,
                           const mr_flash_tensor& k, const mr_flash_tensor& v, const mr_flash_tensor& out,
                           const float* lse, const mr_flash_gradients& gradients, void* workspace,
                           const Launch& at);

}  // namespace millrace::cuda
