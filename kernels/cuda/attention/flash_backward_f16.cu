// Every instantiation of the backward kernels for f16.
#include "kernels/cuda/attention/flash_backward_dims.cuh"

namespace millrace::cuda {

void launch_flash_backward_f16(const FlashBackwardCall& call, const Launch& at) {
  launch_flash_backward_type<__half>(call, at);
}

}  // namespace millrace::cuda
