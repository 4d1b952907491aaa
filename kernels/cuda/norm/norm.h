// Embedding rows and RMSNorm. Right for every type and shape; a row's bits do not depend on the batch, since
// the order of its sum depends on its size alone. Parameters are plain structs; pointers are device memory
// unless they say otherwise. Launches are asynchronous on the stream, take counts of zero, and throw
// Error{kDevice} when refused. B = 4.3 TB/s, the measured copy of an H200: a floor is what a kernel could
// reach.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.h"
#include "kernels/cuda/quant/device_matrix.h"

namespace millrace::cuda {

// out[t, :] = table[tokens[t], :] * scale. Floor: (row_bytes + 4 hidden) * count / B.
void launch_embed(const DeviceMatrix& table, const int32_t* tokens, int64_t count, float scale, float* out,
                  const Launch& at);

// y[i, :] = x[r, :] / sqrt(mean(x[r, :]^2) + eps) * weight, r = source_rows[i], or i when that is null.
// y may be x when source_rows is null and the strides are equal. Floor: 8 size * rows / B.
struct RmsNorm {
  const float* x;              // [.., size], rows x_stride apart
  int64_t x_stride;            // elements
  const int32_t* source_rows;  // [rows] or null
  const float* weight;         // [size]
  float eps;
  int64_t rows, size;
  float* y;  // [rows, size], rows y_stride apart
  int64_t y_stride;
};
void launch_rmsnorm(const RmsNorm& op, const Launch& at);
// The same for rows that lie one after the other.
void launch_rmsnorm(const float* x, const int32_t* source_rows, const float* weight, float eps, int64_t rows,
                    int64_t size, float* y, const Launch& at);

}  // namespace millrace::cuda
