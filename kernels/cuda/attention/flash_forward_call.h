// A call of the forward kernel on its way to the instantiation for its type and head sizes.
#pragma once

#include "kernels/cuda/device.h"
#include "millrace/kernels/flash_attention.h"

namespace millrace::cuda {

struct FlashForwardCall {
  const mr_flash_problem& problem;
  mr_flash_tensor q, k, v, out;
  float* lse;
  int32_t *counter, *tile_starts;  // in the workspace; tile_starts null: dense
};

void launch_flash_forward_bf16(const FlashForwardCall& call, const Launch& at);
void launch_flash_forward_f16(const FlashForwardCall& call, const Launch& at);

}  // namespace millrace::cuda
