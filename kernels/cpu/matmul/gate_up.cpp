#include "kernels/cpu/matmul/gate_up.h"

#include <algorithm>

namespace millrace::cpu {
namespace {

// y = act(gate + bias, up + bias); biases may be absent. gate and up are overwritten; y may be gate.
void activate(const KernelTable& kernels, const GateUp& op, float* gate, const float* gate_bias, float* up,
              const float* up_bias, int64_t count, float* y) {
  // Times one and one: sums, by the table's vectors.
  if (gate_bias != nullptr) kernels.scale_add(gate, 1.0f, gate_bias, 1.0f, count);
  if (up_bias != nullptr) kernels.scale_add(up, 1.0f, up_bias, 1.0f, count);
  switch (op.activation) {
    case Activation::kSilu:
      if (op.up.matrix == nullptr) std::fill_n(up, count, 1.0f);
      return kernels.silu_mul(gate, up, count, y);
    case Activation::kClampedSwiglu:
      return kernels.clamped_swiglu(gate, up, op.alpha, op.limit, count, y);
    case Activation::kGelu:
      kernels.gelu(gate, count, y);
      break;
    case Activation::kGeluTanh:
      kernels.gelu_tanh(gate, count, y);
      break;
    case Activation::kReluSquared:
      for (int64_t i = 0; i < count; ++i) {
        const float x = std::max(gate[i], 0.0f);
        y[i] = x * x;
      }
      break;
  }
  if (op.up.matrix != nullptr) kernels.multiply(y, up, count, y);
}

void scale(float* x, float by, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] *= by;
}

}  // namespace

void gate_up_chunk(const Context& ctx, const GateUp& op, int64_t expert, int64_t first, int64_t count,
                   const ActivationRows& x, int64_t num_m, const InnerActivations& inner, int thread,
                   const PrefetchHint& prefetch, const float* row_scale) {
  const WeightMatrix& gate = *op.gate.matrix;
  const WeightMatrix* up = op.up.matrix;
  const KernelTable& kernels = ctx.kernels;
  float* g = ctx.scratch[thread].tile;
  float* u = g + kMaxRowsPerPass * kMaxRowsPerTask;
  float* dequantized = ctx.scratch[thread].dequantized;
  const int64_t offset = expert * gate.rows + first;  // into biases [experts][rows]
  const float* gate_bias = op.gate.bias == nullptr ? nullptr : op.gate.bias + offset;
  const float* up_bias = op.up.bias == nullptr ? nullptr : op.up.bias + offset;
  const float* y_of[kTileHeight];
  for (int64_t m = 0; m < num_m; m += kMaxRowsPerPass) {
    const int64_t rows = std::min(kMaxRowsPerPass, num_m - m);
    gemm_chunk(kernels, {gate, expert, first, count}, x.from(m), rows, g, count, dequantized,
               up == nullptr ? prefetch : prefetch_of(*up, expert, first, prefetch.done));
    if (up != nullptr) {
      gemm_chunk(kernels, {*up, expert, first, count}, x.from(m), rows, u, count, dequantized,
                 {prefetch.next, prefetch.bytes, true});
    }
    low_rank_add_part(kernels, op.gate_updates, op.updates_at + m, rows, first, count, g, count);
    low_rank_add_part(kernels, op.up_updates, op.updates_at + m, rows, first, count, u, count);
    for (int64_t i = 0; i < rows; ++i) {
      float *gi = g + i * count, *ui = u + i * count;
      float* y = inner.formats.float32 ? inner.values + (m + i) * gate.rows + first : gi;
      if (row_scale != nullptr) {
        scale(gi, row_scale[m + i], count);
        scale(ui, row_scale[m + i], count);
      }
      activate(kernels, op, gi, gate_bias, ui, up_bias, count, y);
      ActivationFormats formats = inner.formats;
      if (formats.bf16_tiles) {  // a group is made at its last row
        formats.bf16_tiles = false;
        const Bf16TileRow to =
            bf16_tile_row(inner.quantized.bf16_tiles, num_m, gate.rows, m + i, first / kQuantBlock);
        const int64_t at = m + i - to.group;
        y_of[at] = y;
        if (at == to.height - 1) {
          kernels.quantize_bf16_tile_group(y_of, to.height, count, to.at - at * kQuantBlock);
        }
      }
      quantize_activations(kernels, formats, y, first, count, m + i, num_m, gate.rows, inner.quantized);
    }
  }
}

void gate_up(const Context& ctx, const GateUp& op, const ActivationRows& x, int64_t rows,
             const InnerActivations& inner) {
  const WeightMatrix& gate = *op.gate.matrix;
  if (ctx.small_batch(rows)) {
    const ShrinkingParts parts(gate.rows, kQuantBlock, ctx.pool.size());
    ctx.begin_product(first_reads(gate, parts.first_rows(), op.up.matrix));
    parallel_rows(ctx.pool, parts, [&](const RowPart& part, int thread) {
      in_bufferfuls(part, [&](int64_t first, int64_t count, int64_t next, bool prefetched) {
        const PrefetchHint prefetch =
            next < 0 ? PrefetchHint{nullptr, 0, prefetched} : prefetch_of(gate, 0, next, prefetched);
        gate_up_chunk(ctx, op, 0, first, count, x, rows, inner, thread, prefetch);
      });
    });
    return;
  }
  const int64_t per_task = rows_per_task(2 * gate.rows, ctx.pool.size());
  ctx.pool.parallel_for(tasks_for(gate.rows, per_task), 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task * per_task, count = std::min(per_task, gate.rows - first);
      gate_up_chunk(ctx, op, 0, first, count, x, rows, inner, thread);
    }
  });
}

}  // namespace millrace::cpu
