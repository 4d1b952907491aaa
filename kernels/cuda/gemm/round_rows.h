// Rows of activations rounded to bf16, in the layout that the tensor core instructions of a GEMM read.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/moe/gelu.h"
#include "kernels/cuda/quant/packed_tiles.h"

namespace millrace::cuda {

// bf16 rows in tiles of rows (the last padded) and whole K steps of 64 columns. For mma.sync (packed_mma.cu),
// 16 rows: [tile][K step][product of 16 columns][lane] 16 bytes. For wgmma (wgmma_mainloop.cuh), 64 rows:
// [tile][K step][row] of 64 elements in the order of column_position, swizzled (ptx/wgmma.cuh).
struct Bf16Rows {
  uint8_t* data = nullptr;
};
inline constexpr int kWarpRows = 16, kWgmmaRows = 64;
inline constexpr int kWgmmaTileBytes = kWgmmaRows * 128;  // of one K step
// Rows of a tile, for the instructions that this device has.
inline int32_t gemm_tile_rows(const Device& device) { return device.has_wgmma() ? kWgmmaRows : kWarpRows; }
size_t bf16_rows_bytes(int64_t rows, int64_t cols, const Device& device);

// Rounds `rows` rows of x, with RMS norm when norm_weight is there: row i is row source_rows[i] of x, or i
// when that is null, and goes to rows sorted_rows[i * copies], .. of the result, or to row i. Floor: (4 + 2
// copies) cols rows / B.
struct RoundRows {
  const float* x = nullptr;              // [.., cols]
  const int32_t* source_rows = nullptr;  // [rows] or null
  const int32_t* sorted_rows = nullptr;  // [rows, copies] or null
  int32_t copies = 1;
  const float* norm_weight = nullptr;  // [cols] or null
  float eps = 0.0f;
  int64_t rows = 0, cols = 0;
  PackedFormat weights = PackedFormat::kNone;  // that the rows are multiplied with
  Bf16Rows to;                                 // bf16_rows_bytes()
};
void launch_round_rows(const RoundRows& op, const Launch& at);

// Rows of act(gate) * up, rounded as above: what down multiplies. Floor: 10 cols rows / B.
struct RoundGated {
  ActivationKind kind = ActivationKind::kSilu;
  const float *gate = nullptr, *up = nullptr;  // [rows, cols]
  int64_t rows = 0, cols = 0;
  PackedFormat weights = PackedFormat::kNone;
  Bf16Rows to;
};
void launch_round_gated(const RoundGated& op, const Launch& at);

}  // namespace millrace::cuda
