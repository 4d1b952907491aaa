// A call of the backward kernels on its way to the instantiation for its type and head sizes.
#pragma once

#include "kernels/cuda/device.h"
#include "millrace/kernels/flash_attention.h"

namespace millrace::cuda {

// Queries of a tile, and the head size that rows are padded to in shared memory.
inline constexpr int32_t flash_backward_dim(const mr_flash_problem& p) {
  return p.head_dim <= 64 && p.value_dim <= 64 ? 64 : 128;
}
inline constexpr int32_t flash_backward_queries(const mr_flash_problem& p) {
  return flash_backward_dim(p) == 64 ? 128 : 64;
}

struct FlashBackwardCall {
  const mr_flash_problem& problem;
  mr_flash_tensor q, k, v, out;
  const float* lse;
  const mr_flash_gradients& gradients;
  // In the workspace. tile_starts null: dense; turns null: any order. What is described in
  // flash_backward.cuh.
  int32_t *counter, *tile_starts, *turns;
  float *lse_log2, *delta, *dq;
  // Null but where the call is deterministic and has lists of blocks, whose dQ is fixed point: the largest of
  // keys' columns and of values, [batch, kv_heads, flash_backward_dim + 1]; powers of two of rows, factors of
  // columns.
  float* bounds;
  int8_t* row_exponents;
  float* column_factors;
};

void launch_flash_backward_bf16(const FlashBackwardCall& call, const Launch& at);
void launch_flash_backward_f16(const FlashBackwardCall& call, const Launch& at);

}  // namespace millrace::cuda
