// The GEMM by clusters, for every shape of work items (wgmma_cluster.cuh).
#include "kernels/cuda/gemm/wgmma_cluster.cuh"

#include <iterator>
#include <utility>

namespace millrace::cuda {
namespace {

constexpr size_t kItemBytes = size_t{kConsumerWarps} * kWarpLanes * kMaxAccumulators * sizeof(float);
constexpr int kLargestShape = static_cast<int>(std::size(kClusterShapes)) - 1;

int choose_shape(const WgmmaGemm& p, bool may_split, const Device& device) {
  int32_t tiles[kMaxParts] = {};
  for (int i = 0; i < p.num_parts; ++i) tiles[i] = p.parts[i].num_tiles;
  return ClusterChoice(tiles, p.num_parts, p.rows, p.k_steps, device.sm_count() / kClusterCtas, may_split)
      .shape;
}
// shape -1: what should take least, or the largest for rows that there is none for.
template <size_t... kShapes>
void launch_cluster_shape(std::index_sequence<kShapes...>, const WgmmaGemm& p, int shape, bool no_split_k,
                          float unscale, const SplitWorkspace& split, const Launch& at) {
  if (shape < 0) shape = choose_shape(p, split.totals != nullptr, at.device);
  if (shape < 0) shape = kLargestShape;
  ((shape == static_cast<int>(kShapes)
        ? launch_cluster_as<kClusterShapes[kShapes].tiles, kClusterShapes[kShapes].tokens>(p, no_split_k,
                                                                                           unscale, split, at)
        : void()),
   ...);
}

}  // namespace

size_t split_workspace_bytes(const Device& device) {
  if (!device.has_wgmma()) return 0;
  return static_cast<size_t>(device.sm_count()) * (kItemBytes + kConsumerWarps * sizeof(uint32_t));
}
SplitWorkspace split_workspace(void* memory, const Device& device) {
  if (memory == nullptr) return {};
  auto* totals = static_cast<float*>(memory);
  return {totals,
          reinterpret_cast<uint32_t*>(totals + static_cast<size_t>(device.sm_count()) * kItemBytes / 4)};
}

void launch_cluster_gemm(const Gemm& op, GemmTile tile, const Launch& at) {
  WgmmaGemm p = wgmma_gemm(op);
  p.tile_bytes = static_cast<uint32_t>(p.k_steps) * kBf16KStepBytes;
  for (int i = 0; i < op.num_parts; ++i) {
    if (op.parts[i].w.dequantized != nullptr) p.parts[i].tiles = op.parts[i].w.dequantized;
  }
  const float unscale = op.parts[0].w.format == PackedFormat::kBf16 ? 1.0f : kPackedUnscale;
  const bool no_split_k = tile == GemmTile::kClusterNoSplitK;
  launch_cluster_shape(std::make_index_sequence<std::size(kClusterShapes)>(), p,
                       no_split_k ? kLargestShape : op.cluster_shape, no_split_k, unscale, op.split, at);
}

}  // namespace millrace::cuda
