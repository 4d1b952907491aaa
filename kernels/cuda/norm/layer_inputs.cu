// A warp has one layer's input of one token: 256 columns in the model there is. Given rows: a CTA each.
// Roofline: memory.
#include "kernels/cuda/norm/layer_inputs.h"

#include "kernels/cuda/tile/reduce.cuh"

namespace millrace::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpLanes;

__global__ void __launch_bounds__(kThreads) layer_inputs_kernel(LayerInputRows op) {
  const int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpLanes;  // [rows][layers]
  if (i >= op.rows * op.layers) return;                                       // whole warps
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int64_t row = i / op.layers, layer = i % op.layers;
  const float *made = op.made + i * op.size, *table = op.table + i * op.size;
  float by = 1.0f;
  if (op.weight != nullptr) {
    float squares = 0.0f;
    for (int c = lane; c < op.size; c += kWarpLanes) {
      const float x = made[c] * op.projection_scale;
      squares = fmaf(x, x, squares);
    }
    by = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(op.size) + op.eps);
  }
  float* out = op.out + (layer * op.rows + row) * op.size;
  for (int c = lane; c < op.size; c += kWarpLanes) {
    const float n = made[c] * op.projection_scale * by * (op.weight != nullptr ? op.weight[c] : 1.0f);
    out[c] = op.scale * (n + table[c]);
  }
}

__global__ void __launch_bounds__(kThreads) scale_by_kernel(const float* by, int64_t size, float* x) {
  const float factor = *by;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size; i += int64_t{gridDim.x} * kThreads)
    x[i] *= factor;
}

__global__ void __launch_bounds__(kThreads) given_rows_kernel(GivenRows op) {
  const float* from = op.values + blockIdx.x * op.stride;
  float* to = op.x + op.numbers[blockIdx.x] * op.cols;
  for (int64_t c = threadIdx.x; c < op.cols; c += kThreads) to[c] = op.add ? to[c] + from[c] : from[c];
}

}  // namespace

void launch_layer_inputs(const LayerInputRows& op, const Launch& at) {
  const int64_t count = op.rows * op.layers;
  if (count == 0) return;
  layer_inputs_kernel<<<static_cast<unsigned>((count + kWarps - 1) / kWarps), kThreads, 0, at.stream>>>(op);
  check_launch("layer_inputs_kernel");
}

void launch_scale_by(const float* by, int64_t size, float* x, const Launch& at) {
  if (size == 0) return;
  constexpr int64_t kMaxBlocks = 1 << 16;  // beyond, a CTA takes several turns
  const int64_t blocks = (size + kThreads - 1) / kThreads;
  scale_by_kernel<<<static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kThreads, 0,
                    at.stream>>>(by, size, x);
  check_launch("scale_by_kernel");
}

void launch_given_rows(const GivenRows& op, const Launch& at) {
  if (op.rows == 0) return;
  given_rows_kernel<<<static_cast<unsigned>(op.rows), kThreads, 0, at.stream>>>(op);
  check_launch("given_rows_kernel");
}

}  // namespace millrace::cuda
