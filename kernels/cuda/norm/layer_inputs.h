// What reaches rows of the residual stream beside the blocks: inputs of layers and their scale (Gemma 4), and
// rows that are given, not looked up (images). A row's bits depend on the row alone. Pointers are device
// memory; launches are asynchronous on the stream, take counts of zero and throw Error{kDevice} when refused.
// B = 4.3 TB/s, the measured copy of an H200.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.h"

namespace millrace::cuda {

// out[l][t, :] = scale * (n(projection_scale * made[t][l, :]) + table[t][l, :]), of every layer l; n is
// RMSNorm with a weight, or nothing where there is none. Floor: 12 size * layers * rows / B.
struct LayerInputRows {
  const float* made = nullptr;   // [rows][layers][size]
  const float* table = nullptr;  // [rows][layers][size]
  float projection_scale = 1.0f, scale = 1.0f, eps = 0.0f;
  const float* weight = nullptr;  // [size], or null
  int64_t rows = 0;
  int32_t layers = 0, size = 0;
  float* out = nullptr;  // [layers][rows][size]
};
void launch_layer_inputs(const LayerInputRows& op, const Launch& at);

// x[i] *= *by. Floor: 8 size / B.
void launch_scale_by(const float* by, int64_t size, float* x, const Launch& at);

// x[numbers[i], :] = values[i, :], or += with `add`; values rows are `stride` floats apart. A row is named
// once. Floor: 8 cols * rows / B.
struct GivenRows {
  const int32_t* numbers = nullptr;  // [rows]
  const float* values = nullptr;
  int64_t stride = 0, rows = 0, cols = 0;
  bool add = false;
  float* x = nullptr;  // [.., cols]
};
void launch_given_rows(const GivenRows& op, const Launch& at);

}  // namespace millrace::cuda
