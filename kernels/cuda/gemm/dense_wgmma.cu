// Dense products on warpgroups (dense_wgmma.cuh): which tile a product has, and which kernel of a type.
#include "kernels/cuda/gemm/dense_wgmma.h"

#include "kernels/cuda/gemm/dense.h"

namespace millrace::cuda {
namespace {

// The tile whose waves take least: cycles of a wave in units of 64 of K, and its epilogue.
int choose_tile(const DenseGemm& op, const Device& device) {
  if (is_gated(op.epilogue.activation)) return 1;
  const auto cost = [&](int64_t rows, int64_t columns, int64_t ctas, int64_t cycles) {
    const int64_t m = (op.m + rows * ctas - 1) / (rows * ctas), n = (op.n + columns - 1) / columns;
    const int64_t slots = device.sm_count() / ctas;
    return (m * n + slots - 1) / slots * (cycles * ((op.k + 63) / 64 + 12));
  };
  // What an SM takes from L2, some 45 bytes a cycle, sets the pace of all but the first.
  const int64_t costs[6] = {cost(128, 256, 2, 1060), cost(128, 128, 1, 560), cost(64, 128, 1, 460),
                            cost(192, 128, 1, 835),  cost(128, 192, 1, 835), cost(64, 64, 1, 330)};
  const bool further = op.type != DenseType::kS8 && !op.mn_major_a && !op.mn_major_b;
  // A scale is that of 128 outputs: warpgroups of the third tile have 64.
  const int tiles = op.epilogue.out == DenseOut::kE4m3 ? 2 : further ? 6 : 3;
  int best = 0;
  for (int i = 1; i < tiles; ++i) {
    if (i == 4 && op.epilogue.residual != nullptr) continue;  // 192 columns of a warpgroup do not go by rows
    best = costs[i] < costs[best] ? i : best;
  }
  return best + 1;
}

}  // namespace

void launch_dense_wgmma(const DenseGemm& op, const Launch& at) {
  const int tile = op.tile > 0 ? op.tile : choose_tile(op, at.device);
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
