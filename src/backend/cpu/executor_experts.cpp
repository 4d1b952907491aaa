// Experts of which every rank has whole ones (cpu_executor.h has the rest).
#include "backend/cpu/cpu_executor.h"
#include "kernels/cpu/moe/expert_outputs.h"
#include "kernels/cpu/moe/experts.h"

namespace millrace::cpu {

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
