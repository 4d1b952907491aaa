// Every instantiation of the forward kernel for f16.
#include "kernels/cuda/attention/flash_forward_dims.cuh"

namespace millrace::cuda {

void launch_flash_forward_f16(const FlashForwardCall& call, const Launch& at) {
  launch_flash_forward_dims<__half>(call, at);
}

}  // namespace millrace::cuda
