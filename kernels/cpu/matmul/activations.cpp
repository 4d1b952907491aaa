#include "kernels/cpu/matmul/activations.h"

#include <algorithm>

namespace millrace::cpu {

ActivationFormats formats_for(const KernelTable& kernels, std::initializer_list<LinearWeights> weights,
                              int64_t rows, bool indexed) {
  ActivationFormats formats;
  for (const LinearWeights& w : weights) {
    if (w.matrix == nullptr) continue;  // experts without a gate
    const ActivationFormat format = kernels.activations(w.matrix->format, rows, indexed);
    formats.int8_blocks |= format == ActivationFormat::kInt8Blocks;
    formats.int8_tiles |= format == ActivationFormat::kInt8Tiles;
    formats.pow2_blocks |= format == ActivationFormat::kPow2Blocks;
    formats.bf16_tiles |= format == ActivationFormat::kBf16Tiles;
    formats.float32 |= format == ActivationFormat::kFloat32;
  }
  return formats;
}

QuantizedActivations take_quantized(Arena& arena, int64_t rows, int64_t cols, bool with_bf16_tiles) {
  QuantizedActivations to;
  const int64_t whole = tasks_for(rows, kTileHeight) * kTileHeight;  // int8 tiles come in whole groups
  to.blocks = arena.take<ActivationBlock>(whole * cols / kQuantBlock);
  if (!with_bf16_tiles) return to;
  to.pow2_blocks = arena.take<ActivationBlock>(std::min(rows, kMaxRowsAsBlocks) * cols / kQuantBlock);
  to.bf16_tiles = arena.take<uint16_t>(rows * cols + kTileSlackBytes);
  return to;
}

void quantize_activations(const KernelTable& kernels, ActivationFormats formats, const float* x,
                          int64_t first, int64_t count, int64_t row, int64_t rows, int64_t cols,
                          const QuantizedActivations& to) {
  const int64_t at = (row * cols + first) / kQuantBlock;
  if (formats.int8_blocks) kernels.quantize_int8(x, count, to.blocks + at);
  if (formats.pow2_blocks) kernels.quantize_pow2(x, count, to.pow2_blocks + at);
  if (formats.int8_tiles) {
    const int64_t group = row / kTileHeight * kTileHeight;
    kernels.quantize_int8_tile(x, count, to.int8_tiles() + (group / kTileHeight * cols + first) / kQuantBlock,
                               row - group, std::min(kTileHeight, rows - group));
  }
  if (formats.bf16_tiles) {
    const Bf16TileRow tile = bf16_tile_row(to.bf16_tiles, rows, cols, row, first / kQuantBlock);
    kernels.quantize_bf16_tile(x, count, tile.at, tile.height);
  }
}

ActivationRows quantize_rows(const Context& ctx, ActivationFormats formats, const float* values, int64_t rows,
                             int64_t cols, const QuantizedActivations& to, int64_t stride) {
  if (stride == 0) stride = cols;
  if (formats.quantized()) {
    const int64_t per_task = activation_rows_per_task(rows, formats.int8_tiles);
    ctx.pool.parallel_for(rows, per_task, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        quantize_activations(ctx.kernels, formats, values + i * stride, 0, cols, i, rows, cols, to);
      }
    });
  }
  return to.rows(values, rows, cols, formats, nullptr, stride);
}

// With few of them a row is a task; a group of int8 tiles has sixteen rows, and no more than two threads.
int64_t activation_rows_per_task(int64_t rows, bool int8_tiles) {
  if (rows <= kSmallBatchRows) return 1;
  return int8_tiles ? 8 : 4;
}

}  // namespace millrace::cpu
