// Which kernel a GEMM goes to: by the device's instructions, the weights' format, and the tile that is tuned.
#include "kernels/cuda/gemm/gemm.h"

#include "kernels/cuda/variants.h"

namespace millrace::cuda {
namespace {

// What is chosen for this shape, or kDefault.
GemmTile tuned_tile(const Gemm& op, const Tuning& tuning) {
  if (tuning.empty() || op.num_parts == 0) return GemmTile::kDefault;
  int64_t outputs = 0;
  for (int i = 0; i < op.num_parts; ++i) outputs += op.parts[i].w.rows;
  return tuning.tile(op.parts[0].w.format, outputs, op.parts[0].w.cols, op.rows);
}

bool has_tiles(const Gemm& op) {
  for (int i = 0; i < op.num_parts; ++i) {
    if (op.parts[i].w.tiles_per_expert > 0) return true;
  }
  return false;
}

}  // namespace

bool supports_tile(GemmTile tile, PackedFormat format) {
  return tile < GemmTile::kCluster || format == PackedFormat::kBf16 || has_codes(format);
}
bool supports_tile(GemmTile tile, const Gemm& op) {
  if (tile < GemmTile::kCluster) return true;
  for (int i = 0; i < op.num_parts; ++i) {
    if (op.parts[i].w.format != PackedFormat::kBf16 && op.parts[i].w.dequantized == nullptr) return false;
  }
  return true;
}

void launch_gemm(const Gemm& wanted, const Launch& at) {
  if (wanted.rows == 0 || !has_tiles(wanted)) return;
  if (!at.device.has_wgmma()) return launch_mma_gemm(wanted, at);
  Gemm op = wanted;
  if (op.tile == GemmTile::kDefault) op.tile = tuned_tile(op, at.device.tuning());
  switch (op.parts[0].w.format) {
    case PackedFormat::kMxfp4:
      return launch_wgmma_gemm<PackedFormat::kMxfp4>(op, at);
    case PackedFormat::kBf16:
      return launch_wgmma_gemm<PackedFormat::kBf16>(op, at);
    case PackedFormat::kQ4:
      return launch_wgmma_gemm<PackedFormat::kQ4>(op, at);
    case PackedFormat::kQ5:
      return launch_wgmma_gemm<PackedFormat::kQ5>(op, at);
    case PackedFormat::kQ6:
      return launch_wgmma_gemm<PackedFormat::kQ6>(op, at);
    default:
      return launch_wgmma_gemm<PackedFormat::kQ8>(op, at);
  }
}

void launch_grouped_gemm(const GroupedGemm& op, const Launch& at) {
  if (op.groups.max_chunks == 0 || op.gate.tiles_per_expert == 0) return;
  if (!at.device.has_wgmma()) return launch_mma_grouped_gemm(op, at);
  switch (op.gate.format) {
    case PackedFormat::kMxfp4:
      return launch_wgmma_grouped_gemm<PackedFormat::kMxfp4>(op, at);
    case PackedFormat::kBf16:
      return launch_wgmma_grouped_gemm<PackedFormat::kBf16>(op, at);
    case PackedFormat::kQ4:
      return launch_wgmma_grouped_gemm<PackedFormat::kQ4>(op, at);
    case PackedFormat::kQ5:
      return launch_wgmma_grouped_gemm<PackedFormat::kQ5>(op, at);
    case PackedFormat::kQ6:
      return launch_wgmma_grouped_gemm<PackedFormat::kQ6>(op, at);
    default:
      return launch_wgmma_grouped_gemm<PackedFormat::kQ8>(op, at);
  }
}

}  // namespace millrace::cuda
