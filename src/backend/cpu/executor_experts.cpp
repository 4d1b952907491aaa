// The cpu executor's experts: which ones a token goes to, the one that all tokens go to, and those of which
// every rank has whole ones.
#include "backend/cpu/cpu_executor.h"
#include "backend/cpu/weight.h"
#include "base/check.h"
#include "kernels/cpu/elementwise/scale.h"
#include "kernels/cpu/matmul/gemm.h"
#include "kernels/cpu/moe/expert_outputs.h"
#include "kernels/cpu/moe/experts.h"

namespace millrace::cpu {
namespace {

TopK::SoftmaxOver softmax_over(Route::Weighting weighting) {
  return weighting == Route::Weighting::kSoftmaxAll ? TopK::SoftmaxOver::kAll : TopK::SoftmaxOver::kChosen;
}

}  // namespace

void CpuExecutor::route(const Route& op) {
  MILLRACE_CHECK(op.router.weight->rows == spec_.experts && op.experts_per_token == spec_.experts_per_token);
  if (rows_ == 0) return;
  if (op.weighting == Route::Weighting::kSigmoid || op.weighting == Route::Weighting::kSigmoidRenormalized) {
    const ActivationRows x = norm_for(op.norm, {&op.router});
    const GemmProduct product{linear_of(op.router), work_->router_scores, spec_.experts};
    gemm(context(), {&product, 1}, x, rows_);
    route_sigmoid_rows(context(),
                       {spec_.experts, spec_.experts_per_token, values_of(op.choice_bias), op.groups,
                        op.groups_chosen, op.weighting == Route::Weighting::kSigmoidRenormalized,
                        work_->router_scores, work_->chosen, work_->chosen_weight},
                       rows_);
    return scale_routing(op.scale);
  }
  const TopK top_k{spec_.experts,
                   spec_.experts_per_token,
                   softmax_over(op.weighting),
                   work_->router_scores,
                   work_->chosen,
                   work_->chosen_weight,
                   op.groups,
                   op.groups_chosen};
  if (op.score_scale != 1.0f) {
    const ActivationRows x = norm_for(op.norm, {&op.router});
    const GemmProduct product{linear_of(op.router), work_->router_scores, spec_.experts};
    gemm(context(), {&product, 1}, x, rows_);
    scale_values(op.score_scale, rows_ * spec_.experts, work_->router_scores);
    route_top_k_rows(context(), top_k, rows_);
  } else {
    normed_formats_ = route_tokens(
        context(), {norm_of(op.norm), linear_of(op.router), work_->router_scores, top_k, work_->input});
  }
  if (op.expert_scales != nullptr) {
    scale_chosen(values_of(op.expert_scales), work_->chosen, rows_ * spec_.experts_per_token,
                 work_->chosen_weight);
  }
  scale_routing(op.scale);
}

void CpuExecutor::scale_routing(float scale) {
  if (scale != 1.0f) scale_values(scale, rows_ * spec_.experts_per_token, work_->chosen_weight);
}

// residual += scale * sigmoid(mix n) * down(act(gate n) * (up n)): of n what route() left in `normed`.
void CpuExecutor::shared_expert_add(const Experts& op) {
  const Experts::Shared& shared = op.shared;
  const Linear& gate = shared.gate.weight != nullptr ? shared.gate : shared.up;
  ActivationFormats formats = formats_for(kernels_, {linear_of(gate), linear_of(shared.up)}, rows_);
  if (shared.mix.weight != nullptr) formats |= formats_for(kernels_, {linear_of(shared.mix)}, rows_);
  const ActivationRows x =
      quantize_rows(context(), formats, work_->normed, rows_, spec_.hidden, work_->input);
  normed_formats_ = {};  // what route() quantized may have been overwritten
  const ActivationRows inner_rows = inner_for(shared.gate, shared.up, shared.down, op.activation, x);
  const Updates updates = updates_of(shared.down, 2, row_adapters_, work_->inner, shared.down.weight->cols);
  const int64_t first = first_column(), cols = shared.down.weight->rows;
  if (cols == 0) return;
  if (shared.mix.weight == nullptr && shared.scale == 1.0f) {
    gemm_add(context(), {linear_of(shared.down), work_->residual + first, spec_.hidden}, inner_rows, rows_);
    return low_rank_add(context(), updates, cols, work_->residual + first, spec_.hidden);
  }
  // Behind the choice of experts their scores are of no use any more.
  float* mix = shared.mix.weight != nullptr ? work_->router_scores : nullptr;
  float* out = work_->expert_out + first;
  const GemmProduct down{linear_of(shared.down), out, spec_.hidden};
  if (mix != nullptr) {
    const GemmProduct mixed{linear_of(shared.mix), mix, 1};
    gemm(context(), {&mixed, 1}, x, rows_);
  }
  gemm(context(), {&down, 1}, inner_rows, rows_);
  low_rank_add(context(), updates, cols, out, spec_.hidden);
  add_mixed(context(), {mix, shared.scale, out, rows_, cols, spec_.hidden, work_->residual + first});
}

void CpuExecutor::experts_add(const Experts& op) {
  if (rows_ == 0) return;
  if (op.norm.present()) return normed_experts_add(op);
  if (op.shared.up.weight != nullptr) shared_expert_add(op);
  if (op.up.weight == nullptr) return;  // another device has them
  run_experts(op, work_->residual);
  gather_columns(work_->residual);
}

// to[rows][hidden] += what the chosen experts make of `normed`.
void CpuExecutor::run_experts(const Experts& op, float* to) {
  MoeWorkspace moe{work_->expert_order,    work_->input,      work_->inner,
                   work_->inner_quantized, work_->expert_out, work_->row_scale};
  GateUp gate_up = gate_up_of(op.gate, op.up, op.activation);
  gate_up.alpha = op.alpha;
  gate_up.limit = op.limit;
  if (part_ != nullptr && part_->whole_experts()) return whole_experts_add(op, gate_up, moe, to);
  InnerExchange exchange;
  if (part_ != nullptr) {
    exchange = {part_->inner(), [&](int64_t rows) {
                  part_->gather_rows(pool_, part_->inner(), op.up.weight->rows, work_->inner,
                                     op.down.weight->cols, rows);
                }};
  }
  const std::optional<ExpertUpdates> updates = expert_updates_of(op);
  moe_experts(
      context(),
      {gate_up, linear_of(op.down), spec_.experts_per_token, work_->chosen, work_->chosen_weight,
       work_->normed, normed_formats_, to + first_column(), rows_, op.weigh_input, spec_.hidden,
       part_ == nullptr ? nullptr : &exchange, watcher_ != nullptr, false, updates ? &*updates : nullptr},
      moe);
  if (watcher_ != nullptr) watch_experts(op);
  normed_formats_ = {};  // tiles of sorted rows may have taken their memory
}

// Of this rank's experts all rows, which everybody has; then their outputs to whoever adds them up.
void CpuExecutor::whole_experts_add(const Experts& op, const GateUp& gate_up, MoeWorkspace& moe, float* to) {
  const int64_t k = spec_.experts_per_token;
  part_->sort_pairs(work_->chosen, rows_ * k, spec_.experts);
  if (part_->has_pairs()) {
    moe_experts(context(),
                {gate_up, linear_of(op.down), k, part_->own_chosen(), work_->chosen_weight, work_->normed,
                 normed_formats_, nullptr, rows_, op.weigh_input, spec_.hidden, nullptr, false, true},
                moe);
  }
  part_->add_experts(context(),
                     {work_->expert_out, moe.order.sorted_row, part_->own_chosen(),
                      op.weigh_input ? nullptr : work_->chosen_weight, linear_of(op.down).bias, spec_.hidden},
                     rows_, k, to + first_column());
  normed_formats_ = {};  // tiles of sorted rows may have taken their memory
}

}  // namespace millrace::cpu
