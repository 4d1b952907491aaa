// What adapters (LoRA) add to the products of a step. The products themselves are the same kernels' as
// without adapters, so that a row without one has the bits that it has alone.
#include <algorithm>

#include "backend/cuda/step_launcher.h"
#include "base/check.h"
#include "kernels/cuda/gemm/low_rank.h"
#include "kernels/cuda/norm/norm.h"

namespace millrace::cuda {

bool StepLauncher::any_update(std::span<const Target> targets) const {
  if (plan_.adapters == nullptr) return false;
  for (const Target& target : targets) {
    for (int32_t i = 0; i < plan_.adapters->size(); ++i) {
      if (plan_.adapters->find(i, target.linear.weight) != nullptr) return true;
    }
  }
  return false;
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
  op.inner = w_.low_rank.as<float>();
  for (const Target& target : targets) {
    op.outputs = target.expected_rows;
    op.y = target.out;
    const int32_t adapters = plan_.adapters->size();
    for (op.first = 0; op.first < adapters; op.first += LowRankUpdates::kMost) {
      op.count = std::min(LowRankUpdates::kMost, adapters - op.first);
      op.max_rank = 0;
      for (int32_t i = 0; i < op.count; ++i) {
        op.updates[i] = {};
        const LowRank* update = plan_.adapters->find(op.first + i, target.linear.weight);
        if (update == nullptr) continue;
        const CudaWeight &a = own(*update->a), &b = own(*update->b);
        MILLRACE_CHECK(a.cols == op.cols && b.rows == op.outputs && a.rows == b.cols &&
                       a.rows <= spec_.adapter_rank && a.float_rows() != nullptr &&
                       b.float_rows() != nullptr);
        op.updates[i] = {a.float_rows(), b.float_rows(), static_cast<int32_t>(a.rows)};
        op.max_rank = std::max(op.max_rank, op.updates[i].rank);
      }
      launch_low_rank(op, at_);
    }
  }
}

}  // namespace millrace::cuda
