// Products of many rows with packed weights: batches of more than four tokens, prefill, and the experts of
// both. The same bf16 products in the same order as the streaming kernels (stream.h): a row's bits do not
// depend on which of them computed it.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/moe/activation.h"
#include "kernels/cuda/quant/packed_tiles.h"

namespace millrace::cuda {

// Rows of activations as the products read them: bf16, in tiles of rows (the last padded) and whole pairs of
// blocks. For warps (wide.cu), 16 rows: [tile][block][step][lane] 16 bytes. For warpgroups
// (wide_product.cuh), 64 rows: [tile][pair][row] of 64 elements in the order of column_position, swizzled
// (ptx/wgmma.cuh).
struct WideRows {
  uint8_t* data = nullptr;
};
inline constexpr int kWarpRows = 16, kWgmmaRows = 64;
inline constexpr int kWgmmaTileBytes = kWgmmaRows * 128;  // of one pair
size_t wide_rows_bytes(int64_t rows, int64_t cols, const Device& device);

// Rounds `rows` rows of x, normed when norm_weight is there: row i is row source_rows[i] of x, or i when that
// is null, and goes to rows places[i * copies], .. of the result, or to row i. Floor: (4 + 2 copies) cols
// rows / B.
struct WideRound {
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
void launch_wide_round(const WideRound& op, const Launch& at);

// What a CTA of a product on warpgroups multiplies at a time: outputs x rows. Fitted ones (wide_fitted.cuh)
// are for weights that lie in memory as bf16. All but the last give the same bits.
enum class WideItems : int32_t {
  kDefault,  // what is tuned (tuning.h) or, else, what should take least
  kWhole,    // 128 x 128
  kHalf,     // 64 x 128
  kSmall,    // 64 x 64
  kFitted,   // as many outputs as let all SMs end together x 256 or 128, by two CTAs
  kLoose,    // 192 x 256, one chain over all columns: other bits, for gemm_bench
};

// Through which CTAs hand over items that are cut in two (wide_fitted.cuh). Without it nothing is cut. All of
// a kernel's CTAs must be resident: for one executor of the GPU (grid_claim.h).
struct WideSplit {
  float* totals = nullptr;    // [SMs][an item's outputs]
  uint32_t* ready = nullptr;  // [SMs][warps]: zeros between two products
  bool always = false;        // cut also where rounds should take less: for tests and gemm_bench
};
size_t wide_split_bytes(const Device& device);
WideSplit wide_split(void* memory, const Device& device);  // so many bytes, zeros

// As StreamLinear, for any number of rows. Compute-bound beyond some 200 rows.
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
  WideItems items = WideItems::kDefault;
  int32_t fitted_shape = -1;  // of kFittedShapes (wide_shares.h); -1: what should take least
  WideSplit split;
};
// Whether such items are for weights of this format, and for these ones: 8-bit ones may be opened or not.
bool fits_items(WideItems items, PackedFormat format);
bool fits_items(WideItems items, const WideLinear& op);
void launch_wide_linear(const WideLinear& op, const Launch& at);

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
ExpertGroups expert_groups(int32_t* base, int64_t pairs, int32_t experts, const Device& device);
size_t expert_groups_ints(int64_t pairs, int32_t experts, const Device& device);
void launch_group_experts(const int32_t* chosen, int64_t pairs, int32_t experts, const ExpertGroups& groups,
                          const Launch& at);

// out[pair, :] = activation(gate, up) or down, of each pair's expert. x: rows in the groups' order. With
// `act` (warpgroups only) activations go there instead, as the rows that down multiplies.
struct WideExperts {
  PackedMatrix gate, up;  // down alone: gate, and up.format kNone
  int32_t experts = 0;
  const float *gate_bias = nullptr, *up_bias = nullptr;
  Activation activation;
  ExpertGroups groups;
  WideRows x;
  float* out = nullptr;  // [pairs, gate.rows]
  WideRows act;
  PackedFormat act_weights = PackedFormat::kNone;  // of down
};
void launch_wide_experts(const WideExperts& op, const Launch& at);

// What the two above call where the device has_wgmma(): a file per format.
template <PackedFormat kFormat>
void launch_wgmma_linear(const WideLinear& op, const Launch& at);
template <PackedFormat kFormat>
void launch_wgmma_experts(const WideExperts& op, const Launch& at);

}  // namespace millrace::cuda
