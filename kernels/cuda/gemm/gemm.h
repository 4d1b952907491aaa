// GEMM of many rows with packed weights: batches of more than four tokens, prefill, and the experts of both
// (grouped GEMM). The same bf16 products in the same order as the GEMV (gemv/gemv.h): a row's bits do not
// depend on which of them computed it.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/gemm/round_rows.h"
#include "kernels/cuda/moe/activation.h"
#include "kernels/cuda/moe/group_experts.h"
#include "kernels/cuda/quant/packed_tiles.h"

namespace millrace::cuda {

// The tile that a CTA of a GEMM on warpgroups multiplies at a time: outputs x rows. Those of clusters
// (wgmma_cluster.cuh) are for weights that lie in memory as bf16. All but the last give the same bits.
enum class GemmTile : int32_t {
  kDefault,          // what is tuned (tuning.h) or, else, what should take least
  k128x128,          //
  k64x128,           //
  k64x64,            //
  kCluster,          // as many outputs as let all SMs finish together x 256 or 128, by two CTAs
  kClusterNoSplitK,  // 192 x 256, K as one chain and not in segments: other bits, for gemm_bench
};

// Through which CTAs pass on work items that are split along K (wgmma_cluster.cuh). Without it nothing is
// split. All of a kernel's CTAs must be resident: for one executor of the GPU (grid_claim.h).
struct SplitWorkspace {
  float* totals = nullptr;    // [SMs][a work item's outputs]
  uint32_t* ready = nullptr;  // [SMs][consumer warps]: zeros between two launches
  bool force = false;         // split also where rounds should take less: for tests and gemm_bench
};
size_t split_workspace_bytes(const Device& device);
SplitWorkspace split_workspace(void* memory, const Device& device);  // so many bytes, zeros

// out (+)= x w^T + bias for up to three matrices of the same format and columns. As Gemv, for any number of
// rows. Compute-bound beyond some 200 rows.
struct Gemm {
  struct Part {
    PackedMatrix w;               // [w.rows, w.cols]
    const float* bias = nullptr;  // [w.rows] or null
    float* out = nullptr;         // [rows, w.rows]
  };
  Part parts[3];
  int32_t num_parts = 0;
  Bf16Rows x;  // [rows, w.cols]
  int64_t rows = 0;
  bool add = false;  // to what is in out
  GemmTile tile = GemmTile::kDefault;
  int32_t cluster_shape = -1;  // of kClusterShapes (cluster_schedule.h); -1: what should take least
  SplitWorkspace split;
};
// Whether such a tile is for weights of this format, and for these ones: 8-bit ones may be dequantized or
// not.
bool supports_tile(GemmTile tile, PackedFormat format);
bool supports_tile(GemmTile tile, const Gemm& op);
void launch_gemm(const Gemm& op, const Launch& at);

// out[pair, :] = activation(gate, up) or down, of each pair's expert. x: rows in the groups' order. With
// `act` (warpgroups only) activations go there instead, as the rows that down multiplies.
struct GroupedGemm {
  PackedMatrix gate, up;  // down alone: gate, and up.format kNone
  int32_t experts = 0;
  const float *gate_bias = nullptr, *up_bias = nullptr;  // [experts, gate.rows] or null
  Activation activation;
  ExpertGroups groups;
  Bf16Rows x;                                      // [groups.max_rows, gate.cols]
  float* out = nullptr;                            // [pairs, gate.rows]
  Bf16Rows act;                                    // [groups.max_rows, gate.rows]
  PackedFormat act_weights = PackedFormat::kNone;  // of down
};
void launch_grouped_gemm(const GroupedGemm& op, const Launch& at);

// What the two above call: with warpgroup instructions a file per format, else packed_mma.cu.
template <PackedFormat kFormat>
void launch_wgmma_gemm(const Gemm& op, const Launch& at);
template <PackedFormat kFormat>
void launch_wgmma_grouped_gemm(const GroupedGemm& op, const Launch& at);
void launch_mma_gemm(const Gemm& op, const Launch& at);
void launch_mma_grouped_gemm(const GroupedGemm& op, const Launch& at);
// Tiles of rows that a CTA of packed_mma.cu multiplies: of a small batch, of a large one.
inline constexpr int kMmaSmallBatchTiles = 2, kMmaLargeBatchTiles = 8;

}  // namespace millrace::cuda
