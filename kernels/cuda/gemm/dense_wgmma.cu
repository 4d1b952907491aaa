// Dense products on warpgroups (dense_wgmma.cuh): which tile a product has, and which kernel of a type.
#include "kernels/cuda/gemm/dense_wgmma.h"

#include "kernels/cuda/gemm/dense.h"

namespace millrace::cuda {
namespace {

int64_t pieces(int64_t size, int64_t of) { return (size + of - 1) / of; }

struct Choice {
  int tile;
  int64_t cycles;
};
// The tile whose waves take least: cycles of a wave in units of 64 of K, and its epilogue.
Choice choose_tile(const DenseGemm& op, const Device& device) {
  const auto cost = [&](int64_t rows, int64_t columns, int64_t ctas, int64_t cycles) {
    const int64_t tiles = pieces(op.m, rows * ctas) * pieces(op.n, columns);
    return pieces(tiles, device.sm_count() / ctas) * (cycles * (pieces(op.k, 64) + 12));
  };
  // Measured. What all SMs together take from L2, some 5,000 bytes a cycle, sets the pace of many; in
  // clusters of two a tile's columns are taken once for both.
  constexpr int kTiles = 8;
  const int64_t costs[kTiles] = {cost(128, 256, 2, 1060), cost(128, 128, 1, 560), cost(64, 128, 1, 460),
                                 cost(192, 128, 1, 835),  cost(128, 192, 1, 835), cost(64, 64, 1, 330),
                                 cost(64, 96, 2, 400),    cost(128, 320, 2, 1420)};
  if (is_gated(op.epilogue.activation)) return {1, costs[0]};
  const bool halves = op.type != DenseType::kS8, nt = halves && !op.mn_major_b;
  // 96, 160 or 192 columns of a warpgroup have no epilogue by rows, as a residual needs that does not come by
  // boxes (dense_launch.cuh).
  const DenseEpilogue& e = op.epilogue;
  const bool no_rows = e.residual == nullptr ||
                       (dense_out_bytes(e.out) == 2 && reinterpret_cast<uintptr_t>(e.residual) % 16 == 0 &&
                        e.residual_stride % 8 == 0);
  const bool has[kTiles] = {
      true, true, true, nt, halves && no_rows, halves && !op.mn_major_a, nt && no_rows, nt && no_rows};
  // A scale is that of 128 outputs: warpgroups of the third tile have 64.
  const int tiles = op.epilogue.out == DenseOut::kE4m3 ? 2 : kTiles;
  int best = 0;
  for (int i = 1; i < tiles; ++i) best = has[i] && costs[i] < costs[best] ? i : best;
  return {best + 1, costs[best]};
}

// K in parts where that takes less than `cycles`: the weights' bytes then set the pace, some 2,000 a cycle of
// the GPU, or a tile's products, and the exchange takes its time.
bool launch_split_k(const DenseGemm& op, int64_t cycles, const Launch& at) {
  if (op.type == DenseType::kS8 || is_gated(op.epilogue.activation) || op.epilogue.out == DenseOut::kE4m3)
    return false;
  constexpr int kMostParts = 5;
  const int64_t stages = pieces(op.k, 64), bytes = op.n * op.k * 2;
  int best_parts = 0;
  bool best_wide = false;
  int64_t best = cycles * 95 / 100;
  const auto consider = [&](bool wide, int parts) {
    const int64_t tiles = wide ? pieces(op.m, 128) * pieces(op.n, 192) : pieces(op.m, 64) * pieces(op.n, 128);
    // Clusters do not fill every GPC: some 22 SMs of 132 have none.
    if (tiles > int64_t{(at.device.sm_count() - 22) / parts}) return;
    const int64_t products = (wide ? 835 : 460) * (pieces(stages, parts) + 12), loads = bytes / 2000 + 4000;
    const int64_t cost = (products > loads ? products : loads) + (wide ? 6000 : 2500);
    if (cost < best) best = cost, best_parts = parts, best_wide = wide;
  };
  for (int parts = 2; parts <= kMostParts; ++parts) {
    consider(true, parts);
    if (!op.mn_major_a) consider(false, parts);
  }
  if (best_parts == 0) return false;
  return op.type == DenseType::kBf16 ? launch_dense_split_bf16(op, best_wide, best_parts, at)
                                     : launch_dense_split_f16(op, best_wide, best_parts, at);
}

}  // namespace

void launch_dense_wgmma(const DenseGemm& op, const Launch& at) {
  const Choice choice = choose_tile(op, at.device);
  if (op.split_k && op.tile == 0 && launch_split_k(op, choice.cycles, at)) return;
  const int tile = op.tile > 0 ? op.tile : choice.tile;
  switch (op.type) {
    case DenseType::kBf16:
      return launch_dense_bf16(op, tile, at);
    case DenseType::kF16:
      return launch_dense_f16(op, tile, at);
    default:
      return launch_dense_s8(op, tile, at);
  }
}

}  // namespace millrace::cuda
