// What adapters (LoRA) add to the products of a step. The products themselves are the same kernels' as
// without adapters, so that a row without one has the bits that it has alone.
#include <algorithm>

#include "backend/cuda/step_launcher.h"
#include "base/check.h"
#include "kernels/cuda/norm/norm.h"

namespace millrace::cuda {

bool StepLauncher::any_update(const Weight* weight) const {
  if (plan_.adapters == nullptr) return false;
  for (int32_t i = 0; i < plan_.adapters->size(); ++i) {
    if (plan_.adapters->find(i, weight) != nullptr) return true;
  }
  return false;
}

bool StepLauncher::any_update(std::span<const Target> targets) const {
  return std::any_of(targets.begin(), targets.end(),
                     [&](const Target& target) { return any_update(target.linear.weight); });
}

bool StepLauncher::any_update(const Experts& op) const {
  return any_update(op.gate.weight) || any_update(op.up.weight) || any_update(op.down.weight);
}

// y += B (A x) of every target. Which rows have which adapter the device looks up: a recorded step serves any
// mix.
void StepLauncher::add_updates(const Rows& rows, std::span<const Target> targets) {
  LowRankUpdates op;
  op.adapters = in_batch(rows.logits ? batch_->logit_adapters() : batch_->adapters());
  op.x = rows.x;
  if (rows.norm != nullptr) {  // the products have normed rows for themselves
    op.x = rows.normed->as<float>();
    launch_rmsnorm(rows.x, rows.source, own(*rows.norm->weight).vector(), rows.norm->eps, rows.count,
                   rows.cols, rows.normed->as<float>(), at_);
  }
  op.rows = rows.count;
  op.cols = rows.cols;
  for (const Target& target : targets) {
    op.outputs = target.expected_rows;
    op.y = target.out;
    launch_updates(op, target.linear.weight);
  }
}

void StepLauncher::add_expert_updates(const Linear& linear, const DeviceBuffer& x, int32_t divide,
                                      const DeviceBuffer& out) {
  if (!any_update(linear.weight)) return;
  LowRankUpdates op;
  op.adapters = in_batch(batch_->adapters());
  op.experts = w_.chosen.as<const int32_t>();
  op.token_pairs = spec_.experts_per_token;
  op.copies = divide;
  op.x = x.as<const float>();
  op.rows = pairs();
  op.cols = linear.weight->cols;
  op.outputs = linear.weight->rows;
  op.y = out.as<float>();
  launch_updates(op, linear.weight);
}

// As many adapters a launch as travel with it.
void StepLauncher::launch_updates(LowRankUpdates& op, const Weight* weight) {
  op.inner = w_.low_rank.as<float>();
  const int32_t adapters = plan_.adapters->size();
  for (op.first = 0; op.first < adapters; op.first += LowRankUpdates::kMost) {
    op.count = std::min(LowRankUpdates::kMost, adapters - op.first);
    op.max_rank = 0;
    for (int32_t i = 0; i < op.count; ++i) {
      op.updates[i] = {};
      const LowRank* update = plan_.adapters->find(op.first + i, weight);
      if (update == nullptr) continue;
      const CudaWeight &a = own(*update->a), &b = own(*update->b);
      MILLRACE_CHECK(a.cols == op.cols && b.rows == op.outputs && a.rows == b.cols &&
                     a.experts == weight->experts && b.experts == weight->experts &&
                     a.rows <= spec_.adapter_rank && a.float_rows() != nullptr && b.float_rows() != nullptr);
      op.updates[i] = {a.float_rows(), b.float_rows(), static_cast<int32_t>(a.rows)};
      op.max_rank = std::max(op.max_rank, op.updates[i].rank);
    }
    launch_low_rank(op, at_);
  }
}

}  // namespace millrace::cuda
