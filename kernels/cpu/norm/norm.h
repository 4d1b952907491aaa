// RMSNorm and LayerNorm of rows over all threads, and the same rows in the formats that the products behind
// them read.
#pragma once

#include "kernels/cpu/matmul/activations.h"

namespace millrace::cpu {

// kRms: y = x / sqrt(mean(x^2) + eps) * weight. kLayer: y = (x - mean) / sqrt(variance + eps) * weight +
// bias. kNone: y = x.
struct NormWeights {
  const float* weight;  // [cols]; of kRms it may be absent
  float eps;
  const float* bias = nullptr;  // [cols] or absent
  enum class Kind { kRms, kLayer, kNone } kind = Kind::kRms;
};
void norm_one(const KernelTable& kernels, const NormWeights& norm, const float* x, int64_t cols, float* y);

struct NormRows {
  NormWeights norm;
  const float* x;  // rows x_stride apart
  int64_t x_stride;
  float* y;  // [rows][cols], rows y_stride apart; may be x where there is no index
  int64_t y_stride;
  int64_t rows, cols;
  const int32_t* index = nullptr;  // y[i] = norm(x[index[i]]); absent: of row i
};

void norm_rows(const Context& ctx, const NormRows& op, int64_t rows_per_task);

// y[to] of the `rows` rows of y, and its quantized formats. By the calling thread.
void norm_row(const KernelTable& kernels, const NormRows& op, int64_t to, ActivationFormats formats,
              const QuantizedActivations& quantized);

// All rows and their quantized formats.
void norm_quantize_rows(const Context& ctx, const NormRows& op, ActivationFormats formats,
                        const QuantizedActivations& quantized);

}  // namespace millrace::cpu
