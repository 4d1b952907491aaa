// A call of the forward kernel on its way to the instantiation for its type and head sizes.
#pragma once

#include "kernels/cuda/device.h"
#include "millrace/kernels/flash_attention.h"

namespace millrace::cuda {

// Of few rows (64 of all heads of a group at most) keys are cut at absolute multiples of these, so that one
// sequence fills the GPU: a row's bits do not depend on how many others there are.
inline constexpr int32_t kFlashSplitKeys = 1024;
inline bool flash_is_decode(const mr_flash_problem& p) {
  const int32_t group = p.heads / p.kv_heads;
  return 64 % group == 0 && p.max_q * int64_t{group} <= 64;
}

struct FlashForwardCall {
  const mr_flash_problem& problem;
  mr_flash_tensor q, k, v, out;
  float* lse;
  // In the workspace. tile_starts null: dense. partial null: not split.
  int32_t *counter, *tile_starts;
  int32_t splits;
  float *partial, *partial_lse;
  uint8_t* value_tiles;  // E4M3: see flash_values.cuh
};

void launch_flash_forward_bf16(const FlashForwardCall& call, const Launch& at);
void launch_flash_forward_f16(const FlashForwardCall& call, const Launch& at);
void launch_flash_forward_e4m3(const FlashForwardCall& call, const Launch& at);

// The workspace of values by tiles, in bytes.
size_t flash_value_tiles_bytes(const mr_flash_problem& p);

}  // namespace millrace::cuda
