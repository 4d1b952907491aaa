// Rows of activations as E4M3 codes with a float32 scale for every 128 columns (kernels/quant/fp8_patches.h):
// the first operand of FP8 prompts' products (dense.h, DenseType::kE4m3).
#pragma once

#include <cstdint>

#include "kernels/cuda/device.h"
#include "kernels/cuda/moe/gelu.h"

namespace millrace::cuda {

struct Fp8Rows {
  uint8_t* codes = nullptr;  // [rows][cols]
  float* scales = nullptr;   // [rows][fp8_row_scales(cols)]
};
inline int64_t fp8_row_scales(int64_t cols) { return (cols + 127) / 128; }

// Rows of x, with RMS norm where norm_weight is there. cols: a multiple of 16. Floor: 5 cols rows / B.
struct RoundFp8 {
  const float* x = nullptr;            // [rows, cols]
  const float* norm_weight = nullptr;  // [cols] or null
  float eps = 0.0f;
  int64_t rows = 0, cols = 0;
  Fp8Rows to;
};
void launch_round_fp8(const RoundFp8& op, const Launch& at);

// Rows of act(gate) * up, both bf16. Floor: 5 cols rows / B.
struct ActivateFp8 {
  ActivationKind kind = ActivationKind::kSilu;
  const uint16_t *gate = nullptr, *up = nullptr;  // [rows, cols]
  int64_t rows = 0, cols = 0;
  Fp8Rows to;
};
void launch_activate_fp8(const ActivateFp8& op, const Launch& at);

}  // namespace millrace::cuda
