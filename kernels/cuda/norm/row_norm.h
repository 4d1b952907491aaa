// Norms beyond RMSNorm with a weight (norm.h): LayerNorm, without weights, none at all; into another buffer,
// in place, or added to one with a factor. And what is done to rows beside them. A row's bits depend on the
// row alone, since the order of a sum depends on the row's size. Pointers are device memory; launches are
// asynchronous on the stream, take counts of zero and throw Error{kDevice} when refused. B = 4.3 TB/s, the
// measured copy of an H200.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.h"

namespace millrace::cuda {

enum class NormKind : int32_t { kNone, kRms, kLayer };

// n(x) = x, x / sqrt(mean(x^2) + eps) * weight, or (x - mean) / sqrt(variance + eps) * weight + bias.
// y[i, :] = n(x[r, :]), or y[i, :] += scale * n(x[r, :]) with `add`; r = source_rows[i], or i when that is
// null. y may be x where neither source_rows nor `add` is given. Floor: 8 size * rows / B, 12 with `add`.
struct RowNorm {
  NormKind kind = NormKind::kRms;
  const float* x = nullptr;              // [.., size]
  const int32_t* source_rows = nullptr;  // [rows] or null
  const float* weight = nullptr;         // [size], or null: ones
  const float* bias = nullptr;           // [size] or null; kLayer's
  float eps = 0.0f;
  int64_t rows = 0, size = 0;
  float* y = nullptr;  // [rows, size]
  bool add = false;
  float scale = 1.0f;
};
void launch_row_norm(const RowNorm& op, const Launch& at);

// x[i] *= scale, then softcap * tanh(x[i] / softcap) unless softcap is 0. Floor: 8 size / B.
void launch_scale_softcap(float scale, float softcap, int64_t size, float* x, const Launch& at);

}  // namespace millrace::cuda
