#include "kernels/cpu/norm/norm.h"

#include <algorithm>

namespace millrace::cpu {

void norm_one(const KernelTable& kernels, const NormWeights& norm, const float* x, int64_t cols, float* y) {
  switch (norm.kind) {
    case NormWeights::Kind::kRms:
      return kernels.rms_norm(x, norm.weight, norm.eps, cols, y);
    case NormWeights::Kind::kLayer:
      return kernels.layer_norm(x, norm.weight, norm.bias, norm.eps, cols, y);
    case NormWeights::Kind::kNone:
      if (x != y) std::copy_n(x, cols, y);
  }
}

void norm_row(const KernelTable& kernels, const NormRows& op, int64_t to, ActivationFormats formats,
              const QuantizedActivations& quantized) {
  const int64_t from = op.index == nullptr ? to : op.index[to];
  float* y = op.y + to * op.y_stride;
  norm_one(kernels, op.norm, op.x + from * op.x_stride, op.cols, y);
  quantize_activations(kernels, formats, y, 0, op.cols, to, op.rows, op.cols, quantized);
}

void norm_rows(const Context& ctx, const NormRows& op, int64_t rows_per_task) {
  ctx.pool.parallel_for(op.rows, rows_per_task, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) norm_row(ctx.kernels, op, i, {}, {});
  });
}

void norm_quantize_rows(const Context& ctx, const NormRows& op, ActivationFormats formats,
                        const QuantizedActivations& quantized) {
  const int64_t per_task = activation_rows_per_task(op.rows, formats.int8_tiles);
  ctx.pool.parallel_for(op.rows, per_task, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) norm_row(ctx.kernels, op, i, formats, quantized);
  });
}

}  // namespace millrace::cpu
