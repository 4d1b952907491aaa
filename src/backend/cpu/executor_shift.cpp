// The cpu executor's operations of RWKV 7: the products of its two mixes.
#include "backend/cpu/cpu_executor.h"
#include "base/check.h"
#include "kernels/cpu/matmul/gemm.h"
#include "kernels/cpu/state/time_mix.h"

namespace millrace::cpu {

ShiftedRows CpuExecutor::shifted_rows(int layer) const {
  const auto [group, index] = spec_.state_place(layer);
  const std::span<const AttentionSequence> sequences = work_->attention_plan.sequences();
  return {spec_.state,
          rows_,
          sequences.data(),
          std::ssize(sequences),
          work_->tables[group],
          reinterpret_cast<float*>(kv_pools_[static_cast<size_t>(group)].data()),
          static_cast<int64_t>(spec_.kv_block_bytes(group) / sizeof(float)),
          index * StateBlock(spec_.state).floats};
}

// work_->time_mix.normed = norm(residual), kept for the next step. What is shifted goes to work_->normed.
void CpuExecutor::norm_shifted(const Norm& norm, const ShiftedRows& rows, ShiftPlace place) {
  normed_formats_ = {};
  NormRows op = norm_of(norm);
  op.y = work_->time_mix.normed;
  norm_rows(context(), op, /*rows_per_task=*/4);
  keep_shifted(context(), rows, place, op.y, work_->time_mix);
}

void CpuExecutor::time_mix(const TimeMix& op) {
  if (rows_ == 0) return;
  TimeMixWorkspace& work = work_->time_mix;
  const ShiftedRows rows = shifted_rows(op.layer);
  const int64_t hidden = spec_.hidden;
  MILLRACE_CHECK(spec_.state.wkv7 && spec_.state.keys() == hidden && spec_.state.values() == hidden);
  norm_shifted(op.norm, rows, ShiftPlace::kTimeMix);
  enum { kR, kDecay, kK, kV, kRate, kGate };
  const auto shift = [&](int input) {
    token_shift(context(), rows, ShiftPlace::kTimeMix, work.normed, values_of(op.shift) + input * hidden,
                work_->normed, work);
  };
  const auto low = [&](const TimeMix::LowRankProduct& by, void (*between)(const Context&, float*, int64_t),
                       float* to) {
    const int64_t rank = by.down.weight->rows;
    MILLRACE_CHECK(rank <= spec_.state.projected);
    multiply(by.down, work_->normed, hidden, work.low);
    if (between != nullptr) between(context(), work.low, rows_ * rank);
    multiply(by.up, work.low, rank, to);
  };
  shift(kR);
  multiply(op.r, work_->normed, hidden, work.r);
  shift(kDecay);
  low(op.decay, tanh_all, work.decay);
  shift(kK);
  multiply(op.k, work_->normed, hidden, work.k);
  shift(kV);
  multiply(op.v, work_->normed, hidden, work.v);
  if (!op.first) low(op.value, nullptr, work.mixed);
  shift(kRate);
  low(op.rate, nullptr, work.rate);
  shift(kGate);
  low(op.gate, sigmoid_all, work.gate);
  cpu::time_mix(
      context(),
      {rows, op.first, values_of(op.k_k), values_of(op.k_a), values_of(op.r_k),
       values_of(op.head_norm.weight), values_of(op.head_norm.bias), op.head_norm.eps, work_->attention},
      work);
}

void CpuExecutor::channel_mix_add(const ChannelMix& op) {
  if (rows_ == 0) return;
  TimeMixWorkspace& work = work_->time_mix;
  const ShiftedRows rows = shifted_rows(op.layer);
  norm_shifted(op.norm, rows, ShiftPlace::kChannelMix);
  token_shift(context(), rows, ShiftPlace::kChannelMix, work.normed, values_of(op.shift), work_->normed,
              work);
  const ActivationFormats formats = formats_for(kernels_, {linear_of(op.key)}, rows_);
  const ActivationRows x =
      quantize_rows(context(), formats, work_->normed, rows_, spec_.hidden, work_->input);
  multiply_add(op.value, inner_for({}, op.key, op.value, Activation::kReluSquared, x), {}, {}, 1.0f);
}

}  // namespace millrace::cpu
