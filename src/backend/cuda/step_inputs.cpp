// The launches of what rows get beside the blocks of a layer: inputs of layers and the end of one (Gemma 4),
// rows that are given (images).
#include "backend/cuda/step_launcher.h"
#include "backend/cuda/step_norms.h"
#include "base/check.h"
#include "kernels/cuda/norm/layer_inputs.h"

namespace millrace::cuda {

// Of all layers at once, behind the embedding: [layers][rows, size] of Workspace::layer_inputs.
void StepLauncher::operator()(const LayerInputs& op) {
  const int64_t size = spec_.layer_input, cols = std::ssize(spec_.layers) * size;
  MILLRACE_CHECK(op.table->cols == cols && (!op.norm.present() || is_plain(op.norm)));
  look_up(*op.table, in_batch(batch_->tokens()), op.table_scale, w_.layer_table);
  const Target made{op.projection, w_.layer_products.as<float>(), cols};
  linears({w_.residual.as<float>(), plan_.rows, spec_.hidden, nullptr, nullptr, nullptr}, {&made, 1}, false);
  LayerInputRows rows;
  rows.made = w_.layer_products.as<const float>();
  rows.table = w_.layer_table.as<const float>();
  rows.projection_scale = op.projection_scale;
  rows.scale = op.scale;
  rows.weight = vector_of(op.norm.weight);
  rows.eps = op.norm.eps;
  rows.rows = plan_.rows;
  rows.layers = static_cast<int32_t>(spec_.layers.size());
  rows.size = spec_.layer_input;
  rows.out = w_.layer_inputs.as<float>();
  launch_layer_inputs(rows, at_);
}

void StepLauncher::operator()(const EndLayer& op) {
  if (op.gate.weight != nullptr) {
    const int64_t size = spec_.layer_input;
    float* gate = w_.layer_products.as<float>();  // [rows, size]: all were used up behind the embedding
    const Target target{op.gate, gate, size};
    linears({w_.residual.as<float>(), plan_.rows, spec_.hidden, nullptr, nullptr, nullptr}, {&target, 1},
            false);
    activate(op.activation, plan_.rows * size, gate,
             w_.layer_inputs.as<const float>() + op.layer * plan_.rows * size);
    linear_add(op.projection, {gate, plan_.rows, size, nullptr, nullptr, nullptr}, op.norm_after, 1.0f);
  }
  if (op.scale == nullptr) return;
  launch_scale_by(vector_of(op.scale), plan_.rows * spec_.hidden, w_.residual.as<float>(), at_);
}

void StepLauncher::operator()(const GivenOp& op) {
  if (plan_.given_rows == 0 || op.layer >= plan_.given_further) return;
  GivenRows rows;
  rows.numbers = plan_.given_numbers;
  rows.stride = (int64_t{1} + plan_.given_further) * spec_.hidden;
  rows.values = plan_.given_values + int64_t{op.layer + 1} * spec_.hidden;
  rows.rows = plan_.given_rows;
  rows.cols = spec_.hidden;
  rows.add = op.layer >= 0;
  rows.x = w_.residual.as<float>();
  launch_given_rows(rows, at_);
}

}  // namespace millrace::cuda
