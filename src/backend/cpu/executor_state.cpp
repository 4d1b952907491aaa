// The cpu executor's layers with a state (base/state_block.h): what goes into the convolution, and what
// becomes of it. executor_shift.cpp has RWKV's.
#include <algorithm>

#include "backend/cpu/cpu_executor.h"
#include "backend/cpu/weight.h"
#include "base/check.h"
#include "kernels/cpu/matmul/gemm.h"
#include "kernels/cpu/state/place_rows.h"
#include "kernels/cpu/state/state_mix.h"

namespace millrace::cpu {

void CpuExecutor::norm_mix(const NormMix& op) {
  if (rows_ == 0) return;
  const StateShape& s = spec_.state;
  GemmProduct products[std::tuple_size_v<decltype(op.in)>];
  size_t count = 0;
  int64_t cols = 0;
  for (const Linear& in : op.in) {
    if (in.weight == nullptr) continue;
    products[count++] = {linear_of(in), work_->projected + cols, 0};
    cols += in.weight->rows;
  }
  const int64_t direct = cols;
  for (const NormMix::Behind& b : op.behind) cols += b.by.weight == nullptr ? 0 : b.by.weight->rows;
  MILLRACE_CHECK(count > 0 && cols <= s.projected);
  for (size_t i = 0; i < count; ++i) products[i].stride = cols;
  // Products that are not there are the first one again.
  const auto in = [&](size_t i) { return op.in[i].weight != nullptr ? &op.in[i] : &op.in[0]; };
  const ActivationRows x = norm_for(op.norm, {in(0), in(1), in(2), in(3), in(4), in(5)});
  gemm(context(), {products, count}, x, rows_);
  watch({&op.in[0], &op.in[1], &op.in[2], &op.in[3], &op.in[4], &op.in[5]}, work_->normed, rows_,
        spec_.hidden);
  multiply_behind(op, direct, cols);
  place_rows(context(), {work_->projected,
                         rows_,
                         cols,
                         s.mix_cols(),
                         {{{op.query, s.query_at()},
                           {op.key, s.key_at()},
                           {op.value, s.value_at()},
                           {op.gate, s.gate_at()},
                           {op.step, s.step_at()},
                           {op.beta, s.beta_at()}}},
                         {op.value_by, s.value_at()},
                         work_->mix});
}

// Products of products' columns, into `projected` from column `to` on; rows are `cols` wide.
void CpuExecutor::multiply_behind(const NormMix& op, int64_t to, int64_t cols) {
  for (const NormMix::Behind& b : op.behind) {
    if (b.by.weight == nullptr) continue;
    const int64_t size = b.by.weight->cols;
    MILLRACE_CHECK(size <= spec_.hidden);
    for (int64_t row = 0; row < rows_; ++row)
      std::copy_n(work_->projected + row * cols + b.first, size, work_->normed + row * size);
    watch({&b.by}, work_->normed, rows_, size);
    const ActivationFormats formats = formats_for(kernels_, {linear_of(b.by)}, rows_);
    const ActivationRows x = quantize_rows(context(), formats, work_->normed, rows_, size, work_->input);
    const GemmProduct product{linear_of(b.by), work_->projected + to, cols};
    gemm(context(), {&product, 1}, x, rows_);
    to += b.by.weight->rows;
  }
}

void CpuExecutor::mix(const StateMix& op) {
  if (rows_ == 0) return;
  const auto [group, index] = spec_.state_place(op.layer);
  const std::span<const AttentionSequence> sequences = work_->attention_plan.sequences();
  state_mix(context(),
            {spec_.state,
             static_cast<StateMixRows::Kind>(op.kind),
             work_->mix,
             rows_,
             sequences.data(),
             std::ssize(sequences),
             work_->tables[group],
             reinterpret_cast<float*>(kv_pools_[group].data()),
             static_cast<int64_t>(spec_.kv_block_bytes(group) / sizeof(float)),
             index * StateBlock(spec_.state).floats,
             values_of(op.conv),
             values_of(op.conv_bias),
             values_of(op.conv_keys),
             values_of(op.conv_values),
             op.conv_silu,
             values_of(op.a),
             values_of(op.step_bias),
             values_of(op.d),
             op.step_min,
             op.step_max,
             values_of(op.norm.weight),
             op.norm.eps,
             op.norm_size,
             op.norm_before_gate,
             op.gate_sigmoid,
             work_->attention},
            work_->state);
}

}  // namespace millrace::cpu
