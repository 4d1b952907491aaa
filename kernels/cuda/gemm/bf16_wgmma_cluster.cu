// Items of wide products by clusters, and for what they are there (wide_fitted.cuh).
#include "kernels/cuda/gemm/wgmma_cluster.cuh"

#include <iterator>
#include <utility>

namespace millrace::cuda {
namespace {

constexpr size_t kItemBytes = size_t{kMultiplyWarps} * kWarpLanes * kMostSums * sizeof(float);
constexpr int kWidest = static_cast<int>(std::size(kFittedShapes)) - 1;

int fitted_shape(const WgmmaLinear& p, bool cut, const Device& device) {
  int32_t tiles[kMostParts] = {};
  for (int i = 0; i < p.num_parts; ++i) tiles[i] = p.parts[i].num_tiles;
  return FittedChoice(tiles, p.num_parts, p.rows, p.pairs, device.sm_count() / kClusterCtas, cut).shape;
}
// shape -1: the widest, for rows that there is none for.
template <size_t... kShapes>
void launch_fitted(std::index_sequence<kShapes...>, const WgmmaLinear& p, int shape, bool loose,
                   float unscale, const WideSplit& split, const Launch& at) {
  if (shape < 0) shape = fitted_shape(p, split.totals != nullptr, at.device);
  if (shape < 0) shape = kWidest;
  ((shape == static_cast<int>(kShapes)
        ? launch_fitted_as<kFittedShapes[kShapes].tiles, kFittedShapes[kShapes].tokens>(p, loose, unscale,
                                                                                        split, at)
        : void()),
   ...);
}

}  // namespace

bool fits_items(WideItems items, PackedFormat format) {
  return items < WideItems::kFitted || format == PackedFormat::kBf16 || format == PackedFormat::kQ8;
}
bool fits_items(WideItems items, const WideLinear& op) {
  if (items < WideItems::kFitted) return true;
  for (int i = 0; i < op.num_parts; ++i) {
    if (op.parts[i].w.format != PackedFormat::kBf16 && op.parts[i].w.opened == nullptr) return false;
  }
  return true;
}

size_t wide_split_bytes(const Device& device) {
  if (!device.has_wgmma()) return 0;
  return static_cast<size_t>(device.sm_count()) * (kItemBytes + kMultiplyWarps * sizeof(uint32_t));
}
WideSplit wide_split(void* memory, const Device& device) {
  if (memory == nullptr) return {};
  auto* totals = static_cast<float*>(memory);
  return {totals,
          reinterpret_cast<uint32_t*>(totals + static_cast<size_t>(device.sm_count()) * kItemBytes / 4)};
}

void launch_fitted_linear(const WideLinear& op, WideItems items, const Launch& at) {
  WgmmaLinear p = wgmma_linear(op);
  p.tile_bytes = static_cast<uint32_t>(p.pairs) * kBf16PairBytes;
  for (int i = 0; i < op.num_parts; ++i) {
    if (op.parts[i].w.opened != nullptr) p.parts[i].tiles = op.parts[i].w.opened;
  }
  const float unscale = op.parts[0].w.format == PackedFormat::kBf16 ? 1.0f : kMx4Unscale;
  const bool loose = items == WideItems::kLoose;
  launch_fitted(std::make_index_sequence<std::size(kFittedShapes)>(), p, loose ? kWidest : op.fitted_shape,
                loose, unscale, op.split, at);
}

}  // namespace millrace::cuda
