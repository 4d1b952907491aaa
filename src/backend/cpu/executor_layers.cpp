// What few architectures have: gates of attention (Qwen 3 Next); inputs of every layer, the end of a layer
// and experts with norms of their own (Gemma 4).
#include <algorithm>

#include "backend/cpu/cpu_executor.h"
#include "base/check.h"
#include "kernels/cpu/embedding/embed.h"
#include "kernels/cpu/matmul/gemm.h"
#include "kernels/cpu/norm/norm.h"

namespace millrace::cpu {
namespace {

constexpr int64_t kLayerRowsPerTask = 4;

}  // namespace

// Query and gate of each head alternate in the product.
void CpuExecutor::split_gates() {
  const int64_t dim = spec_.head_dim;
  for (int64_t i = 0; i < rows_ * spec_.heads; ++i) {
    std::copy_n(work_->projected + 2 * i * dim, dim, work_->query + i * dim);
    std::copy_n(work_->projected + (2 * i + 1) * dim, dim, work_->attention_gate + i * dim);
  }
}

// attention *= sigmoid(gate), of all rows: what is left out later costs little here.
void CpuExecutor::gate_attention() {
  pool_.parallel_for(rows_, kLayerRowsPerTask, [&](int64_t begin, int64_t end, int) {
    float* gate = work_->attention_gate + begin * work_->query_cols;
    float* y = work_->attention + begin * work_->query_cols;
    const int64_t count = (end - begin) * work_->query_cols;
    for (int64_t i = 0; i < count; ++i) gate[i] = -gate[i];
    kernels_.exp(gate, count, gate);
    for (int64_t i = 0; i < count; ++i) y[i] /= 1.0f + gate[i];
  });
}

void CpuExecutor::layer_inputs(const LayerInputs& op) {
  if (rows_ == 0) return;
  const int64_t cols = work_->layer_input_cols, size = spec_.layer_input;
  MILLRACE_CHECK(op.table->cols == cols && op.projection.weight->rows == cols);
  embed_rows(context(), own(*op.table).matrix.view, batch_.tokens.data(), rows_, op.table_scale,
             work_->layer_inputs);
  watch({&op.projection}, work_->residual, rows_, spec_.hidden);
  multiply(op.projection, work_->residual, spec_.hidden, work_->layer_products);
  const NormWeights norm = weights_of(op.norm);
  pool_.parallel_for(rows_, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin * cols; at < end * cols; at += size) {
      float *made = work_->layer_products + at, *input = work_->layer_inputs + at;
      for (int64_t i = 0; i < size; ++i) made[i] *= op.projection_scale;
      norm_one(kernels_, norm, made, size, made);
      for (int64_t i = 0; i < size; ++i) input[i] = (made[i] + input[i]) * op.scale;
    }
  });
}

void CpuExecutor::end_layer(const EndLayer& op) {
  if (rows_ == 0) return;
  if (op.gate.weight != nullptr) {
    const int64_t size = spec_.layer_input;
    MILLRACE_CHECK(op.gate.weight->rows == size && op.activation == Activation::kGeluTanh);
    float* gated = work_->layer_products;
    watch({&op.gate}, work_->residual, rows_, spec_.hidden);
    multiply(op.gate, work_->residual, spec_.hidden, gated);
    pool_.parallel_for(rows_, kLayerRowsPerTask, [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        float* y = gated + row * size;
        kernels_.gelu_tanh(y, size, y);
        kernels_.multiply(y, work_->layer_inputs + row * work_->layer_input_cols + op.layer * size, size, y);
      }
    });
    watch({&op.projection}, gated, rows_, size);
    const ActivationFormats formats = formats_for(kernels_, {linear_of(op.projection)}, rows_);
    multiply_add(op.projection, quantize_rows(context(), formats, gated, rows_, size, work_->input), {},
                 op.norm_after, 1.0f);
  }
  normed_formats_ = {};
  if (op.scale == nullptr) return;
  const float by = *values_of(op.scale);
  for (int64_t i = 0; i < rows_ * spec_.hidden; ++i) work_->residual[i] *= by;
}

// In the order of the rows, one thread: they are few, and each is added to once.
void CpuExecutor::add_given(int layer) {
  for (const GivenRow& given : batch_.given) {
    if (layer >= given.further) continue;
    normed_formats_ = {};
    float* x = work_->residual + int64_t{given.row} * spec_.hidden;
    const float* more = given.values + int64_t{layer + 1} * spec_.hidden;
    for (int64_t i = 0; i < spec_.hidden; ++i) x[i] += more[i];
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
  float *sum = work_->expert_sum, *made = work_->normed;
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
  const NormWeights behind = weights_of(op.experts_norm_after), last = weights_of(op.norm_after);
  pool_.parallel_for(rows_, kLayerRowsPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin * hidden; at < end * hidden; at += hidden) {
      norm_one(kernels_, behind, experts + at, hidden, made + at);
      kernels_.scale_add(made + at, 1.0f, sum + at, 1.0f, hidden);
      norm_one(kernels_, last, made + at, hidden, made + at);
      kernels_.scale_add(work_->residual + at, 1.0f, made + at, 1.0f, hidden);
    }
  });
}

}  // namespace millrace::cpu
