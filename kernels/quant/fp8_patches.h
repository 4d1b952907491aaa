// Matrices and rows in E4M3 with a float32 scale for each 128 x 128 patch of a matrix and each 1 x 128 of a
// row: the operands of FP8 prompts (kernels/cuda/gemm/fp8_mainloop.cuh, kernels/reference/naive_linear.h).
//
// A scale is the largest magnitude of its patch divided by 448, and a code is to_fp8_e4m3(x * (448 /
// largest)). A patch of values below kFp8Least has a scale and codes of zero. A checkpoint whose own scales
// are one to a patch keeps its codes and its scales.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor/tensor_view.h"

namespace millrace::quant {

inline constexpr int64_t kFp8Patch = 128;
inline constexpr float kFp8Largest = 448.0f;
inline constexpr float kFp8Least = 1e-30f;  // 448 / x is finite above it

struct Fp8Patches {
  int64_t rows = 0, cols = 0;
  std::vector<uint8_t> codes;  // [rows][cols]
  std::vector<float> scales;   // [patch_rows()][patch_cols()]
  int64_t patch_rows() const { return (rows + kFp8Patch - 1) / kFp8Patch; }
  int64_t patch_cols() const { return (cols + kFp8Patch - 1) / kFp8Patch; }
};

// One matrix, no F32, whose rows are whole blocks of 32, and rows of products a whole number of 16 bytes.
bool fits_fp8_patches(const TensorView& view);
// Bytes of what shaped_fp8_patches makes.
size_t fp8_patches_bytes(const TensorView& view);
Fp8Patches shaped_fp8_patches(const TensorView& view);  // nothing in it yet
// Fills patch row `patch_row`. Different ones may be filled by different threads.
void fill_fp8_patches(const TensorView& view, int64_t patch_row, Fp8Patches& to);

// A row's codes, [cols], and scales, [patch_cols].
void fp8_row(const float* x, int64_t cols, uint8_t* codes, float* scales);

}  // namespace millrace::quant
