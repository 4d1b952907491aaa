#include "kernels/cpu/matmul/gemm_heads.h"

#include <algorithm>

namespace millrace::cpu {
namespace {

constexpr int64_t kOutputsPerTask = 4 * kRowsAtOnce;

int64_t whole_rows(int64_t rows) { return tasks_for(rows, kTileHeight) * kTileHeight; }

// Head h's part of the memory: a product of its own, in whole groups of rows.
QuantizedActivations head_of(const QuantizedActivations& all, int64_t h, int64_t rows, int64_t cols) {
  const int64_t blocks = h * whole_rows(rows) * cols / kQuantBlock;
  QuantizedActivations head{all.blocks == nullptr ? nullptr : all.blocks + blocks, nullptr, nullptr};
  if (all.bf16_tiles == nullptr) return head;
  head.pow2_blocks = all.pow2_blocks + h * std::min(rows, kMaxRowsAsBlocks) * cols / kQuantBlock;
  head.bf16_tiles = all.bf16_tiles + h * whole_rows(rows) * cols;
  return head;
}

}  // namespace

int64_t gemm_heads_rows(int64_t heads, int64_t rows) { return heads * whole_rows(rows); }

void gemm_heads(const Context& ctx, const GemmHeads& op, const QuantizedActivations& quantized) {
  const WeightMatrix& w = *op.weights.matrix;
  const int64_t heads = w.experts, rows = op.rows, cols = w.cols;
  if (rows == 0) return;
  const ActivationFormats formats = formats_for(ctx.kernels, {op.weights}, rows);
  if (formats.quantized()) {
    // A task is a group of rows of a head: rows of one tile are written by one thread.
    const int64_t groups = tasks_for(rows, kTileHeight);
    ctx.pool.parallel_for(heads * groups, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t h = task / groups, first = task % groups * kTileHeight;
        const QuantizedActivations to = head_of(quantized, h, rows, cols);
        for (int64_t m = first; m < std::min(rows, first + kTileHeight); ++m) {
          quantize_activations(ctx.kernels, formats, op.x + m * op.x_stride + h * op.x_head_stride, 0, cols,
                               m, rows, cols, to);
        }
      }
    });
  }
  const int64_t pieces = tasks_for(w.rows, kOutputsPerTask);
  ctx.pool.parallel_for(heads * pieces, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t h = task / pieces, first = task % pieces * kOutputsPerTask;
      const ActivationRows x =
          head_of(quantized, h, rows, cols)
              .rows(op.x + h * op.x_head_stride, rows, cols, formats, nullptr, op.x_stride);
      gemm_chunk(ctx.kernels, {w, h, first, std::min(kOutputsPerTask, w.rows - first)}, x, rows,
                 op.out + h * op.out_head_stride + first, op.out_stride, ctx.scratch[thread].dequantized);
    }
  });
}

}  // namespace millrace::cpu
