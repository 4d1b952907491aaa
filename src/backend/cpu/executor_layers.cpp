// What few architectures have: inputs of every layer, the end of a layer and experts with norms of their own
// (Gemma 4); rows that are given (images).
#include <algorithm>

#include "backend/cpu/cpu_executor.h"
#include "base/check.h"
#include "kernels/cpu/elementwise/scale.h"
#include "kernels/cpu/embedding/embed.h"
#include "kernels/cpu/matmul/gemm.h"
#include "kernels/cpu/norm/layer_inputs.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kLayerRowsPerTask = 4;

}  // namespace

void CpuExecutor::layer_inputs(const LayerInputs& op) {
  if (rows_ == 0) return;
  const int64_t cols = work_->layer_input_cols;
  MILLRACE_CHECK(op.table->cols == cols && op.projection.weight->rows == cols);
  embed_rows(context(), own(*op.table).matrix.view, batch_.tokens.data(), rows_, op.table_scale,
             work_->layer_inputs);
  multiply(op.projection, work_->residual, spec_.hidden, work_->layer_products);
  cpu::layer_inputs(context(), {weights_of(op.norm), op.projection_scale, op.scale, rows_, cols,
                                spec_.layer_input, work_->layer_products, work_->layer_inputs});
}

void CpuExecutor::end_layer(const EndLayer& op) {
  if (rows_ == 0) return;
  if (op.gate.weight != nullptr) {
    const int64_t size = spec_.layer_input;
    MILLRACE_CHECK(op.gate.weight->rows == size && op.activation == Activation::kGeluTanh);
    float* gated = work_->layer_products;
    multiply(op.gate, work_->residual, spec_.hidden, gated);
    gate_layer_inputs(context(), work_->layer_inputs + op.layer * size, work_->layer_input_cols, rows_, size,
                      gated);
    watch({&op.projection}, gated, rows_, size);
    const ActivationFormats formats = formats_for(kernels_, {linear_of(op.projection)}, rows_);
    multiply_add(op.projection, quantize_rows(context(), formats, gated, rows_, size, work_->input), {},
                 op.norm_after, 1.0f);
  }
  normed_formats_ = {};
  if (op.scale != nullptr) scale_values(*values_of(op.scale), rows_ * spec_.hidden, work_->residual);
}

// In the order of the rows, one thread: they are few, and each is added to once.
void CpuExecutor::add_given(int layer) {
  for (const GivenRow& given : batch_.given) {
    if (layer >= given.further) continue;
    normed_formats_ = {};
    add_values(given.values + int64_t{layer + 1} * spec_.hidden, spec_.hidden,
               work_->residual + int64_t{given.row} * spec_.hidden);
  }
}

// residual += norm_after(shared_norm_after(shared(..)) + experts_norm_after(experts(..))): what the shared
// one made waits in `expert_sum` while the experts run.
void CpuExecutor::normed_experts_add(const Experts& op) {
  const int64_t hidden = spec_.hidden;
  const Experts::Shared& shared = op.shared;
  MILLRACE_CHECK(part_ == nullptr && shared.gate.weight != nullptr && shared.mix.weight == nullptr);
  const ActivationRows x = norm_for(op.shared_norm, {&shared.gate, &shared.up});
  const ActivationRows inner = inner_for(shared.gate, shared.up, shared.down, op.activation, x);
  const Updates updates = updates_of(shared.down, 2, row_adapters_, work_->inner, shared.up.weight->rows);
  float* sum = work_->expert_sum;
  const GemmProduct down{linear_of(shared.down), sum, hidden};
  gemm(context(), {&down, 1}, inner, rows_);
  low_rank_add(context(), updates, hidden, sum, hidden);
  norm_rows(context(), {weights_of(op.shared_norm_after), sum, hidden, sum, hidden, rows_, hidden},
            kLayerRowsPerTask);
  norm_for(op.norm, {});
  // The experts' sum begins with zeros, and is added to what waits when it is normed.
  float* experts = work_->expert_total;
  std::fill_n(experts, rows_ * hidden, 0.0f);
  run_experts(op, experts);
  add_normed_sum(context(), {weights_of(op.experts_norm_after), weights_of(op.norm_after), sum, experts,
                             rows_, hidden, work_->normed, work_->residual});
}

}  // namespace millrace::cpu
