#include "kernels/cpu/moe/expert_outputs.h"

#include <algorithm>

namespace millrace::cpu {
namespace {

constexpr int64_t kRowsPerTask = 4;

}  // namespace

void weigh_outputs(const Context& ctx, const WeighOutputs& op, std::span<const int32_t> pairs, int64_t first,
                   int64_t count, float* to) {
  ctx.pool.parallel_for(std::ssize(pairs), kRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int32_t pair = pairs[static_cast<size_t>(i)];
      const float* out = op.out + op.sorted_row[pair] * op.cols + first;
      const float weight = op.weights == nullptr ? 1.0f : op.weights[pair];
      float* y = to + i * count;
      if (op.bias == nullptr) {
        for (int64_t c = 0; c < count; ++c) y[c] = weight * out[c];
      } else {
        const float* bias = op.bias + op.chosen[pair] * op.cols + first;
        for (int64_t c = 0; c < count; ++c) y[c] = weight * (out[c] + bias[c]);
      }
    }
  });
}

void add_outputs(const Context& ctx, const AddOutputs& op) {
  ctx.pool.parallel_for(op.rows, kRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      constexpr int64_t kStrip = 64;  // columns summed at a time
      for (int64_t first = 0; first < op.cols; first += kStrip) {
        const int64_t count = std::min(kStrip, op.cols - first);
        float sum[kStrip] = {};
        for (int64_t slot = 0; slot < op.k; ++slot) {
          const int32_t place = op.place[row * op.k + slot];
          if (place < 0) continue;
          const float* from = op.from + place * op.cols + first;
          for (int64_t i = 0; i < count; ++i) sum[i] += from[i];
        }
        float* y = op.y + row * op.stride + first;
        for (int64_t i = 0; i < count; ++i) y[i] += sum[i];
      }
    }
  });
}

void add_mixed(const Context& ctx, const AddMixed& op) {
  if (op.mix != nullptr) {
    for (int64_t row = 0; row < op.rows; ++row) op.mix[row] = -op.mix[row];
    ctx.kernels.exp(op.mix, op.rows, op.mix);
  }
  ctx.pool.parallel_for(op.rows, kRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const float by = op.mix == nullptr ? op.scale : op.scale / (1.0f + op.mix[row]);
      ctx.kernels.scale_add(op.residual + row * op.stride, 1.0f, op.x + row * op.stride, by, op.cols);
    }
  });
}

}  // namespace millrace::cpu
