// Every instantiation of the backward kernels for bf16.
#include "kernels/cuda/attention/flash_backward_dims.cuh"

namespace millrace::cuda {

void launch_flash_backward_bf16(const FlashBackwardCall& call, const Launch& at) {
  launch_flash_backward_type<__nv_bfloat16>(call, at);
}

}  // namespace millrace::cuda
