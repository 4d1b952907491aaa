// What reaches rows of the residual stream beside the products of blocks: inputs of layers and their gates
// (Gemma 4), and outputs that are normed before they are added. A row's bits depend on the row alone. Bound
// by memory: a row is read and written once or twice.
#pragma once

#include "kernels/cpu/norm/norm.h"

namespace millrace::cpu {

// inputs[t][l] = scale * (norm(projection_scale * made[t][l]) + inputs[t][l]), of every layer l.
struct LayerInputRows {
  NormWeights norm;  // of `size` columns
  float projection_scale, scale;
  int64_t rows, cols, size;  // cols: layers * size
  float* made;               // [rows][cols]; overwritten
  float* inputs;             // [rows][cols]: the table's rows before
};
void layer_inputs(const Context& ctx, const LayerInputRows& op);

// y[t] = gelu_tanh(y[t]) * inputs[t]; y: [rows][size], rows of inputs `stride` apart.
void gate_layer_inputs(const Context& ctx, const float* inputs, int64_t stride, int64_t rows, int64_t size,
                       float* y);

// residual[t] += scale * norm(x[t]), [rows][cols] both; x becomes what was normed.
void add_normed_rows(const Context& ctx, const NormWeights& norm, float scale, int64_t rows, int64_t cols,
                     float* x, float* residual);

// residual[t] += norm(shared[t] + experts_norm(experts[t])): two halves of a mixture, [rows][cols] all.
struct NormedSum {
  NormWeights experts_norm, norm;
  const float *shared, *experts;
  int64_t rows, cols;
  float* sum;  // the sum, normed
  float* residual;
};
void add_normed_sum(const Context& ctx, const NormedSum& op);

}  // namespace millrace::cpu
