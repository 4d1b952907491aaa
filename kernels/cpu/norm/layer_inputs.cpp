#include "kernels/cpu/norm/layer_inputs.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kLayerRowsPerTask = 4;

}  // namespace

void layer_inputs(const Context& ctx, const LayerInputRows& op) {
  ctx.pool.parallel_for(op.rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin * op.cols; at < end * op.cols; at += op.size) {
      float *made = op.made + at, *input = op.inputs + at;
      for (int64_t i = 0; i < op.size; ++i) made[i] *= op.projection_scale;
      norm_one(ctx.kernels, op.norm, made, op.size, made);
      for (int64_t i = 0; i < op.size; ++i) input[i] = (made[i] + input[i]) * op.scale;
    }
  });
}

void gate_layer_inputs(const Context& ctx, const float* inputs, int64_t stride, int64_t rows, int64_t size,
                       float* y) {
  ctx.pool.parallel_for(rows, kLayerRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      float* gated = y + row * size;
      ctx.kernels.gelu_tanh(gated, size, gated);
      ctx.kernels.multiply(gated, inputs + row * stride, size, gated);
    }
  });
}

void add_normed_rows(const Context& ctx, const NormWeights& norm, float scale, int64_t rows, int64_t cols,
                     float* x, float* residual) {
  ctx.pool.parallel_for(rows, kLayerRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin * cols; at < end * cols; at += cols) {
      norm_one(ctx.kernels, norm, x + at, cols, x + at);
      ctx.kernels.scale_add(residual + at, 1.0f, x + at, scale, cols);
    }
  });
}

void add_normed_sum(const Context& ctx, const NormedSum& op) {
  ctx.pool.parallel_for(op.rows, kLayerRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin * op.cols; at < end * op.cols; at += op.cols) {
      float* sum = op.sum + at;
      norm_one(ctx.kernels, op.experts_norm, op.experts + at, op.cols, sum);
      ctx.kernels.scale_add(sum, 1.0f, op.shared + at, 1.0f, op.cols);
      norm_one(ctx.kernels, op.norm, sum, op.cols, sum);
      ctx.kernels.scale_add(op.residual + at, 1.0f, sum, 1.0f, op.cols);
    }
  });
}

}  // namespace millrace::cpu
