#include "dist/share_plan.h"

#include <algorithm>

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
  // An all_to_all of experts' outputs: a rank sends each of the others the columns that are theirs.
  const auto outputs = [&](const PlanShape::Inner& inner) {
    const int64_t mine = shares.experts(inner.whole_experts).size(), own = shares.rows(inner.cols).size();
    const int64_t all = sends ? mine * (inner.cols - own) : (inner.whole_experts - mine) * own;
    return inner.rows_per_token * all / inner.whole_experts;
  };
  int64_t values = 0;
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    const PlanShape::Layer& layer = shape.layers[l];
    int64_t per_row = (shape.whole_attention ? 0 : attended) + layer.residuals * cut(shape.hidden);
    for (const PlanShape::Inner& inner : layer.inner) {
      per_row += inner.whole_experts > 0 ? outputs(inner) : inner.rows_per_token * cut(inner.cols);
    }
    values += per_row * (l + 1 == shape.layers.size() && layer.attends ? logit_rows : rows);
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
  for (const PlanShape::Layer& layer : shape.layers) {
    count += (shape.whole_attention ? 0 : 1) + layer.residuals + static_cast<int64_t>(layer.inner.size());
  }
  return count;
}

TokenTime Plan::token_time(double alone_s, const LinkSpeed& link) const {
  size_t read = 0;
  for (size_t i = 0; i < ranks.front().parts.size(); ++i) {
    size_t most = 0;
    for (const Rank& rank : ranks) most = std::max(most, rank.parts[i].read_bytes);
    read += most;
  }
  TokenTime time;
  time.computing_s = alone_s * static_cast<double>(read) / static_cast<double>(read_bytes);
  const auto others = static_cast<int64_t>(ranks.size()) - 1;
  if (others == 0) return time;
  // In an exchange a rank hears from one of the others after the other. The logits stay; in their place are
  // two orders of rank 0, the step and its tokens, and what ranks say of these.
  const int64_t latencies = (exchanges_per_step() - 1) * others + 2 + others;
  time.latency_s = link.latency_s * static_cast<double>(latencies);
  uint64_t most = 0;
  for (int r = 0; r <= others; ++r) most = std::max({most, received(r, 1, 1), sent(r, 1, 1)});
  time.moving_s = link.bytes_per_s > 0 ? static_cast<double>(most) / link.bytes_per_s : 0;
  return time;
}

}  // namespace millrace::dist
