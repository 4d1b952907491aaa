// Products of many rows with packed weights: batches of more than four tokens, prefill, and the experts of
// both. The same integers, scales and order of sums as the streaming kernels (stream.h): a row's bits do not
// depend on which of them computed it.
#pragma once

#include "backend/cuda/ops/ops.h"
#include "backend/cuda/ops/packed.h"

namespace millrace::cuda {

// Quantized rows as the A operand reads them, in tiles (the last padded) and whole pairs of blocks.
// For warps (wide.cu), 16 rows a tile: codes [tile][block][lane] 16 bytes; scales [tile][block][16].
// For warpgroups (wide_wgmma.cu), 64 rows: [tile][pair] of codes [row] of 64 integers as f16, swizzled
//   (ptx/wgmma.cuh), each eight of them elements 4t, 16+4t, 4t+1, .. of a block; then scales [even,
//   odd][row].
// For MXFP4 weights rows are not quantized but rounded to bf16. For warps: [tile][block][step][lane] 16
// bytes; for
//   warpgroups (wide_mx4.cu): [tile][pair][row] of 64 elements in the order of mx4_position, swizzled.
struct WideRows {
  uint8_t* codes = nullptr;
  float* scales = nullptr;  // for warps
};
inline constexpr int kWarpRows = 16, kWgmmaRows = 64;
inline constexpr int kWgmmaTileBytes = kWgmmaRows * (128 + 2 * 4);  // of one pair
inline constexpr int kMx4TileBytes = kWgmmaRows * 128;              // the same for MXFP4 weights
// Whether this GPU and binary take warpgroups, for everything.
bool has_wgmma();
size_t wide_rows_bytes(int64_t rows, int64_t cols);
WideRows wide_rows(uint8_t* base, int64_t rows, int64_t cols);

// Quantizes `rows` rows of x, normed when norm_weight is there: row i is row source_rows[i] of x, or i when
// that is null, and goes to rows places[i * copies], .. of the result, or to row i. Floor: (4 + copies) cols
// rows / B.
struct WideQuantize {
  const float* x = nullptr;  // [.., cols]
  const int32_t* source_rows = nullptr;
  const int32_t* places = nullptr;
  int32_t copies = 1;
  const float* norm_weight = nullptr;
  float eps = 0.0f;
  int64_t rows = 0, cols = 0;
  PackedFormat weights = PackedFormat::kNone;  // that the rows are for
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

// (token, slot) pairs sorted by expert, each expert's padded to whole tiles of rows, and the tiles cut into
// chunks.
struct ExpertGroups {
  int32_t* order = nullptr;   // [max_rows]: the pair of each sorted row, -1 in the padding
  int32_t* places = nullptr;  // [pairs]: the sorted row of each
  int32_t* chunks = nullptr;  // [max_chunks][4]: expert, first tile, tiles, rows
  int32_t* num_chunks = nullptr;
  int64_t max_rows = 0;
  int32_t max_chunks = 0;
  int32_t tile_rows = 0, tiles_per_chunk = 0;
};
// Sizes for so many pairs; int32s to allocate in all, and the parts of such an allocation.
ExpertGroups expert_groups(int32_t* base, int64_t pairs, int32_t experts);
size_t expert_groups_ints(int64_t pairs, int32_t experts);
void launch_group_experts(const int32_t* chosen, int64_t pairs, int32_t experts, const ExpertGroups& groups,
                          cudaStream_t stream);

// out[pair, :] = activation(gate, up) or down, of each pair's expert. x: rows in the groups' order. With
// `act` (warpgroups and MXFP4 only) activations go there instead, as the rows that down multiplies.
struct WideExperts {
  PackedMatrix gate, up;  // down alone: gate, and up.format kNone
  int32_t experts = 0;
  const float *gate_bias = nullptr, *up_bias = nullptr;
  Activation activation;
  ExpertGroups groups;
  WideRows x;
  float* out = nullptr;  // [pairs, gate.rows]
  WideRows act;
};
void launch_wide_experts(const WideExperts& op, cudaStream_t stream);

// What the two above call where has_wgmma().
void launch_wgmma_linear(const WideLinear& op, cudaStream_t stream);
void launch_wgmma_experts(const WideExperts& op, cudaStream_t stream);

}  // namespace millrace::cuda
