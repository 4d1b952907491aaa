// Products of many rows with packed weights: batches of more than four tokens, prefill, and the experts of
// both. The same integers, scales and order of sums as the streaming kernels (stream.h): a row's bits do not
// depend on which of them computed it.
#pragma once

#include "backend/cuda/ops/ops.h"
#include "backend/cuda/ops/packed.h"

namespace millrace::cuda {

// Quantized rows as the A operand reads them, in tiles of 16 rows (16 rows each, the last padded):
//   codes [tile][block][lane] 16 bytes; scales [tile][block][16]. Blocks are padded to whole pairs.
struct WideRows {
  uint8_t* codes = nullptr;
  float* scales = nullptr;
};
size_t wide_rows_bytes(int64_t rows, int64_t cols);
WideRows wide_rows(uint8_t* base, int64_t rows, int64_t cols);

// Quantizes rows of x, normed when norm_weight is there. Row i of the result is row r of x: r =
// source_rows[i] / divide, or i when that is null; negative: nobody needs it. Floor: 5 cols rows / B.
struct WideQuantize {
  const float* x = nullptr;  // [.., cols]
  const int32_t* source_rows = nullptr;
  int32_t divide = 1;
  const float* norm_weight = nullptr;
  float eps = 0.0f;
  int64_t rows = 0, cols = 0;
  WideRows to;
};
void launch_wide_quantize(const WideQuantize& op, cudaStream_t stream);

// As StreamLinear, for any number of rows. Compute-bound beyond some 100 rows: per 8 x 32 weights and 16 rows
// one tensor core instruction and twelve float operations of a warp.
struct WideLinear {
  struct Part {
    PackedMatrix w;
    const float* bias = nullptr;
    float* out = nullptr;  // [rows, w.rows]
  };
  Part parts[3];
  int32_t num_parts = 0;
  WideRows x;
  int64_t rows = 0;
  bool add = false;
};
void launch_wide_linear(const WideLinear& op, cudaStream_t stream);

// (token, slot) pairs sorted by expert, each expert's padded to tiles of 16 rows, and the tiles cut into
// chunks.
struct ExpertGroups {
  int32_t* order = nullptr;   // [max_rows]: the pair of each sorted row, -1 in the padding
  int32_t* chunks = nullptr;  // [max_chunks][3]: expert, first tile, tiles
  int32_t* num_chunks = nullptr;
  int64_t max_rows = 0;
  int32_t max_chunks = 0;
  int32_t tiles_per_chunk = 0;
};
// Sizes for so many pairs; int32s to allocate in all, and the parts of such an allocation.
ExpertGroups expert_groups(int32_t* base, int64_t pairs, int32_t experts);
size_t expert_groups_ints(int64_t pairs, int32_t experts);
void launch_group_experts(const int32_t* chosen, int64_t pairs, int32_t experts, const ExpertGroups& groups,
                          cudaStream_t stream);

// act[pair, :] = activation(gate, up) or out[pair, :] = down, of each pair's expert. x: rows in the groups'
// order.
struct WideExperts {
  PackedMatrix gate, up;  // down alone: gate, and up.format kNone
  const float *gate_bias = nullptr, *up_bias = nullptr;
  Activation activation;
  ExpertGroups groups;
  WideRows x;
  float* out = nullptr;  // [pairs, gate.rows]
};
void launch_wide_experts(const WideExperts& op, cudaStream_t stream);

}  // namespace millrace::cuda
