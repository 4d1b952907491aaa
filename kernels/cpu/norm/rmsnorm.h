// RMSNorm of rows over all threads, y = x / sqrt(mean(x^2) + eps) * weight, and the same rows in the formats
// that the products behind it read.
#pragma once

#include "kernels/cpu/matmul/activations.h"

namespace millrace::cpu {

struct RmsNorm {
  const float* weight;  // [cols]
  float eps;
};

struct RmsNormRows {
  RmsNorm norm;
  const float* x;  // rows x_stride apart
  int64_t x_stride;
  float* y;  // [rows][cols], rows y_stride apart; may be x where there is no index
  int64_t y_stride;
  int64_t rows, cols;
  const int32_t* index = nullptr;  // y[i] = norm(x[index[i]]); absent: of row i
};

void rmsnorm_rows(const Context& ctx, const RmsNormRows& op, int64_t rows_per_task);

// y[to] of the `rows` rows of y, and its quantized formats. By the calling thread.
void rmsnorm_row(const KernelTable& kernels, const RmsNormRows& op, int64_t to, ActivationFormats formats,
                 const QuantizedActivations& quantized);

// All rows and their quantized formats.
void rmsnorm_quantize_rows(const Context& ctx, const RmsNormRows& op, ActivationFormats formats,
                           const QuantizedActivations& quantized);

}  // namespace millrace::cpu
