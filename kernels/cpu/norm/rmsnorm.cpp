#include "kernels/cpu/norm/rmsnorm.h"

namespace millrace::cpu {

void rmsnorm_row(const KernelTable& kernels, const RmsNormRows& op, int64_t to, ActivationFormats formats,
                 const QuantizedActivations& quantized) {
  const int64_t from = op.index == nullptr ? to : op.index[to];
  float* y = op.y + to * op.y_stride;
  kernels.rms_norm(op.x + from * op.x_stride, op.norm.weight, op.norm.eps, op.cols, y);
  quantize_activations(kernels, formats, y, 0, op.cols, to, op.rows, op.cols, quantized);
}

void rmsnorm_rows(const Context& ctx, const RmsNormRows& op, int64_t rows_per_task) {
  ctx.pool.parallel_for(op.rows, rows_per_task, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) rmsnorm_row(ctx.kernels, op, i, {}, {});
  });
}

void rmsnorm_quantize_rows(const Context& ctx, const RmsNormRows& op, ActivationFormats formats,
                           const QuantizedActivations& quantized) {
  const int64_t per_task = activation_rows_per_task(op.rows, formats.int8_tiles);
  ctx.pool.parallel_for(op.rows, per_task, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) rmsnorm_row(ctx.kernels, op, i, formats, quantized);
  });
}

}  // namespace millrace::cpu
