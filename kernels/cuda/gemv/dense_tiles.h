// The GEMV of few or very many 8-bit tiles (dense_tiles.cu), behind launch_gemv; and what it shares with
// dense.cu.
#pragma once

#include "kernels/cuda/gemv/gemv.h"

namespace millrace::cuda {

// Is it the faster one for this? Without an activation, of rows in float32.
bool prefers_gemv_tiles(const Gemv& op, const Device& device);
// ring_bytes: of shared memory where tiles do not all fit; 0: built in.
void launch_gemv_tiles(const Gemv& op, uint32_t ring_bytes, const Launch& at);

struct GemvTile {
  const Gemv::Part* part;
  int tile;
};
__host__ __device__ inline GemvTile find_tile(const Gemv& op, int tile) {
  int i = 0;
  while (i + 1 < op.num_parts && tile >= op.parts[i].w.tiles_per_expert)
    tile -= op.parts[i++].w.tiles_per_expert;
  return {&op.parts[i], tile};
}

// Bytes from one row of activations to the next: neighbours lie in different banks.
__host__ __device__ inline uint32_t gemv_row_stride(int k_steps) {
  return static_cast<uint32_t>(k_steps) * kKStepColumns * 2 + 64;
}

}  // namespace millrace::cuda
