// Every instantiation of the forward kernel for bf16.
#include "kernels/cuda/attention/flash_forward_dims.cuh"

namespace millrace::cuda {

void launch_flash_forward_bf16(const FlashForwardCall& call, const Launch& at) {
  launch_flash_forward_dims<__nv_bfloat16>(call, at);
}

}  // namespace millrace::cuda
