#include "dist/share_plan.h"

namespace millrace::dist {
namespace {

constexpr uint64_t kValueBytes = sizeof(float);

}  // namespace

// An all_gather of `total` columns: a rank sends its own to each of the others and receives all but its own.
uint64_t Plan::exchanged(int64_t rows, int64_t logit_rows, int rank, bool sends) const {
  const Shares shares(rank, speeds);
  const int others = shares.ranks() - 1;
  const auto moved = [&](int64_t own, int64_t total) { return sends ? own * others : total - own; };
  const auto cut = [&](int64_t total) { return moved(shares.rows(total).size(), total); };
  const int64_t attended = moved(shares.heads(shape.heads, shape.kv_heads).query.size() * shape.head_dim,
                                 shape.heads * shape.head_dim);
  int64_t values = 0;
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    int64_t per_row = attended + 2 * cut(shape.hidden);
    for (const PlanShape::Inner& inner : shape.layers[l]) per_row += inner.rows_per_token * cut(inner.cols);
    values += per_row * (l + 1 == shape.layers.size() ? logit_rows : rows);
  }
  return static_cast<uint64_t>(values) * kValueBytes;
}

uint64_t Plan::received(int rank, int64_t rows, int64_t logit_rows) const {
  return exchanged(rows, logit_rows, rank, false);
}
uint64_t Plan::sent(int rank, int64_t rows, int64_t logit_rows) const {
  return exchanged(rows, logit_rows, rank, true);
}

uint64_t Plan::logits_received(int64_t logit_rows) const {
  const Shares shares(0, speeds);
  return static_cast<uint64_t>(logit_rows * (shape.vocab - shares.rows(shape.vocab).size())) * kValueBytes;
}

int64_t Plan::exchanges_per_step() const {
  int64_t count = 1;  // logits
  for (const auto& layer : shape.layers) count += 3 + static_cast<int64_t>(layer.size());
  return count;
}

}  // namespace millrace::dist
