// Products of heads with a matrix of their own each (latent attention's absorbed projections).
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/quant/device_matrix.h"
#include "kernels/cuda/quant/packed_tiles.h"

namespace millrace::cuda {

// y[row, head, :] = W[head] x[row, head, :] for W [heads, out, in]: one chain of tensor core products over
// the columns for packed weights, of float32 sums for others. A row's bits do not depend on the others. x and
// y: rows and heads these many elements apart. Floor: the bytes of W and rows * heads * 4 (in + out) / B, or
// 2 rows heads in out operations.
struct HeadGemm {
  PackedMatrix packed;  // format kNone: `matrix` has the weights
  DeviceMatrix matrix;
  int32_t heads = 0;
  int64_t rows = 0;
  const float* x = nullptr;
  int64_t x_row = 0, x_head = 0;
  float* y = nullptr;
  int64_t y_row = 0, y_head = 0;
};
void launch_head_gemm(const HeadGemm& op, const Launch& at);

}  // namespace millrace::cuda
