// Low-rank updates (LoRA) of a product's rows: y[row, :] += B (A x[row, :]), each row with the A and B of its
// adapter or none, and of experts with those of its expert. In float32; a row's bits do not depend on the
// others, nor on their adapters and experts.
#pragma once

#include "kernels/cuda/device.h"

namespace millrace::cuda {

struct LowRankUpdates {
  struct Update {
    const float* a = nullptr;  // [rank, cols], of experts [experts, rank, cols]; null: none of this product
    const float* b = nullptr;  // [outputs, rank], [experts, outputs, rank]
    int32_t rank = 0;
  };
  static constexpr int kMost = 32;  // adapters of a launch: they travel with it
  Update updates[kMost];
  int32_t first = 0, count = 0;       // adapters first .. first + count - 1 are updates[0 .. count)
  int32_t max_rank = 0;               // of them
  const int32_t* adapters = nullptr;  // [rows]: of each row; others than the above are left alone
  // Of experts, rows are pairs of a token and an expert: the expert of each [rows]; null: a plain product.
  const int32_t* experts = nullptr;
  int32_t token_pairs = 1;   // pairs of a token, side by side: adapters [rows / token_pairs]
  int32_t copies = 1;        // rows that read the same row of x, side by side
  const float* x = nullptr;  // [rows / copies, cols]
  int64_t rows = 0, cols = 0, outputs = 0;
  float* inner = nullptr;  // [rows, max_rank], for A x
  float* y = nullptr;      // [rows, outputs]
};
// Floor: the bytes of A and B once for eight rows, from L2, and of x and y twice; 2 rows rank (cols +
// outputs) FP32 operations.
void launch_low_rank(const LowRankUpdates& op, const Launch& at);

}  // namespace millrace::cuda
