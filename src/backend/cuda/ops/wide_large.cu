// The large items of wide products, and for what they are there (wide_large.cuh).
#include <iterator>
#include <utility>

#include "backend/cuda/ops/wide_fitted.cuh"

namespace millrace::cuda {
namespace {

constexpr size_t kItemBytes = size_t{kMultiplyWarps} * kWarpLanes * kMostSums * sizeof(float);

int fitted_tiles(const WgmmaLinear& p, bool cut) {
  int32_t tiles[kLargeParts] = {};
  for (int i = 0; i < p.num_parts; ++i) tiles[i] = p.parts[i].num_tiles;
  return FittedWidth(tiles, p.num_parts, p.rows, multiprocessors() / kClusterCtas, cut).tiles;
}
// The width is one of kFittedTiles; the widest, for rows that they are not for.
template <size_t... kWidths>
void launch_fitted(std::index_sequence<kWidths...>, const WgmmaLinear& p, int tiles, float unscale,
                   const WideSplit& split, cudaStream_t stream) {
  if (tiles == 0) tiles = fitted_tiles(p, split.totals != nullptr);
  if (((tiles != kFittedTiles[kWidths]) && ...)) tiles = kFittedTiles[sizeof...(kWidths) - 1];
  ((tiles == kFittedTiles[kWidths] ? launch_fitted_as<kFittedTiles[kWidths]>(p, unscale, split, stream)
                                   : void()),
   ...);
}

}  // namespace

bool fits_items(WideItems items, PackedFormat format) {
  return items < WideItems::kLarge || format == PackedFormat::kBf16 || format == PackedFormat::kQ8;
}
bool fits_items(WideItems items, const WideLinear& op) {
  if (items < WideItems::kLarge) return true;
  for (int i = 0; i < op.num_parts; ++i) {
    if (op.parts[i].w.format != PackedFormat::kBf16 && op.parts[i].w.opened == nullptr) return false;
  }
  return true;
}

size_t wide_split_bytes() {
  if (!has_wgmma()) return 0;
  return static_cast<size_t>(multiprocessors()) * (kItemBytes + kMultiplyWarps * sizeof(uint32_t));
}
WideSplit wide_split(void* memory) {
  if (memory == nullptr) return {};
  auto* totals = static_cast<float*>(memory);
  return {totals,
          reinterpret_cast<uint32_t*>(totals + static_cast<size_t>(multiprocessors()) * kItemBytes / 4)};
}

void launch_large_linear(const WideLinear& op, WideItems items, cudaStream_t stream) {
  WgmmaLinear p = wgmma_linear(op);
  p.tile_bytes = static_cast<uint32_t>(p.pairs) * kBf16PairBytes;
  for (int i = 0; i < op.num_parts; ++i) {
    if (op.parts[i].w.opened != nullptr) p.parts[i].tiles = op.parts[i].w.opened;
  }
  const float unscale = op.parts[0].w.format == PackedFormat::kBf16 ? 1.0f : kMx4Unscale;
  if (items == WideItems::kFitted) {
    return launch_fitted(std::make_index_sequence<std::size(kFittedTiles)>(), p, op.fitted_tiles, unscale,
                         op.split, stream);
  }
  if (items == WideItems::kMiddle) return launch_large<96>(p, items, unscale, op.split, stream);
  launch_large<192>(p, items, unscale, op.split, stream);
}

}  // namespace millrace::cuda
