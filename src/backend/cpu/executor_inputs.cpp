// What an executor does with the inputs of its products besides: what adapters add, and what calibration
// watches.
#include <algorithm>

#include "backend/cpu/cpu_executor.h"
#include "base/check.h"
#include "kernels/cpu/elementwise/scale.h"

namespace millrace::cpu {

// ---------------------------------------------------------------- adapters

void CpuExecutor::note_adapters(const Batch& batch) {
  row_adapters_.clear();
  logit_adapters_.clear();
  if (batch.adapters == nullptr) return;
  const auto has_one = [](const SequenceSlice& slice) { return slice.adapter >= 0 && slice.num_tokens > 0; };
  if (std::none_of(batch.sequences.begin(), batch.sequences.end(), has_one)) return;
  for (const SequenceSlice& slice : batch.sequences) {
    row_adapters_.insert(row_adapters_.end(), static_cast<size_t>(slice.num_tokens), slice.adapter);
  }
  for (const int32_t row : batch.logit_rows)
    logit_adapters_.push_back(row_adapters_[static_cast<size_t>(row)]);
}

bool CpuExecutor::any_update(const Linear& op) const {
  int32_t before = -1;
  for (const int32_t adapter : row_adapters_) {
    if (adapter != before && batch_.adapters->find(adapter, op.weight) != nullptr) return true;
    before = adapter;
  }
  return false;
}

// What rows with these adapters add to their products with op.weight, of x [rows][in]. `place`: of up to
// three products whose updates are needed at once.
CpuExecutor::Updates CpuExecutor::updates_of(const Linear& op, int place, std::span<const int32_t> adapters,
                                             const float* x, int64_t stride) {
  std::vector<LowRankRun>& runs = runs_[place];
  runs.clear();
  float* inner = work_->low_rank[place];
  for (size_t row = 0; row < adapters.size();) {
    size_t end = row + 1;
    while (end < adapters.size() && adapters[end] == adapters[row]) ++end;
    if (const LowRank* update = batch_.adapters->find(adapters[row], op.weight)) {
      MILLRACE_CHECK(update->a->rows <= spec_.adapter_rank);
      const auto count = static_cast<int64_t>(end - row);
      runs.push_back(
          {static_cast<int64_t>(row), count, &own(*update->a).matrix, &own(*update->b).matrix, inner});
      inner += count * update->a->rows;
    }
    row = end;
  }
  low_rank_inner(context(), runs, x, stride);
  return runs;
}

// Of experts: which of their matrices the adapters of this step's rows update, if any.
std::optional<ExpertUpdates> CpuExecutor::expert_updates_of(const Experts& op) {
  const Linear& first = op.gate.weight == nullptr ? op.up : op.gate;
  const bool two = op.gate.weight != nullptr;
  if (!any_update(first) && !(two && any_update(op.up)) && !any_update(op.down)) return std::nullopt;
  ExpertUpdates updates{.adapters = row_adapters_, .gate = {}, .up = {}, .down = {}};
  const Weight* const weights[] = {first.weight, two ? op.up.weight : nullptr, op.down.weight};
  ExpertUpdates::Product* const products[] = {&updates.gate, &updates.up, &updates.down};
  for (int place = 0; place < 3; ++place) {
    std::vector<ExpertUpdates::Pair>& pairs = expert_pairs_[place];
    pairs.assign(static_cast<size_t>(batch_.adapters->size()), {});
    for (int32_t i = 0; i < batch_.adapters->size(); ++i) {
      const LowRank* update = batch_.adapters->find(i, weights[place]);
      if (update == nullptr) continue;
      MILLRACE_CHECK(update->a->rows <= spec_.adapter_rank);
      pairs[static_cast<size_t>(i)] = {&own(*update->a).matrix, &own(*update->b).matrix};
    }
    *products[place] = {pairs, &runs_[place], work_->low_rank[place]};
  }
  return updates;
}

// ---------------------------------------------------------------- calibration

void CpuExecutor::watch(std::initializer_list<const Linear*> products, const float* x, int64_t rows,
                        int64_t stride) {
  if (watcher_ == nullptr) return;
  const Weight* weights[std::tuple_size_v<decltype(NormMix::in)>];  // none has more
  size_t count = 0;
  for (const Linear* product : products) {
    if (product->weight != nullptr) weights[count++] = product->weight;
  }
  watcher_->see({weights, count}, 0, x, rows, stride);
}

// Of latent attention: each head's part of a row with its own matrix. x: [rows][heads * head_stride]
void CpuExecutor::watch_heads(const Linear& op, const float* x, int64_t head_stride) {
  if (watcher_ == nullptr) return;
  for (int64_t head = 0; head < spec_.heads; ++head) {
    watcher_->see({&op.weight, 1}, head, x + head * head_stride, rows_, spec_.heads * head_stride);
  }
}

// Behind moe_experts: which rows went to whom, and what `down` was multiplied with.
void CpuExecutor::watch_experts(const Experts& op) {
  const ExpertOrder& order = work_->expert_order;
  const Weight* const each[] = {op.up.weight, op.gate.weight};
  const std::span both(each, op.gate.weight == nullptr ? 1 : 2);
  const int64_t inner = op.down.weight->cols, k = spec_.experts_per_token;
  std::vector<float> weighed(static_cast<size_t>(spec_.hidden));
  for (int64_t i = 0; i < rows_ * k; ++i) {
    const float* x = work_->normed + i / k * spec_.hidden;
    const float by = op.weigh_input ? work_->chosen_weight[i] : 1.0f;
    std::copy_n(x, spec_.hidden, weighed.data());
    scale_values(by, spec_.hidden, weighed.data());
    watcher_->see(both, work_->chosen[i], weighed.data(), 1, spec_.hidden);
    const Weight* const down[] = {op.down.weight};
    watcher_->see(down, work_->chosen[i], work_->inner + order.sorted_row[i] * inner, 1, inner);
  }
}

}  // namespace millrace::cpu
