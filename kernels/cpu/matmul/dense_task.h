// What a product of plain matrices hands to the kernels of an instruction set (dense_panel.h).
#pragma once

#include <stdint.h>

namespace millrace::cpu {

inline constexpr int kDenseLanes = 64;

enum class DenseElement { kF32, kF16, kBF16, kE4M3, kE5M2, kI8 };

// C[rows][64] (+)= sum over `depth` of A and B[depth][64]. lanes: columns that count, rounded up to 32.
struct DensePanel {
  const float* a;
  int64_t a_row_stride, a_k_stride;
  const float* b;
  float* c;
  int64_t rows, depth, lanes;
  bool add;  // else C is overwritten
};

}  // namespace millrace::cpu
