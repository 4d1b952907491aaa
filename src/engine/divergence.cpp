#include "engine/divergence.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace millrace {
namespace {

struct Row {
  double kl = 0.0, excess_nll = 0.0;
  bool agree = false;
};

// With p = e^(b - log sum e^b) the divergence is the sum of p (b - m), less log sum e^b, and log sum e^m: two
// exponentials for each token of the vocabulary. One that the baseline rules out, at -infinity, adds nothing.
Row compare(std::span<const float> baseline, std::span<const float> model, int32_t next) {
  const auto top_b = std::max_element(baseline.begin(), baseline.end());
  const auto top_m = std::max_element(model.begin(), model.end());
  const double max_b = *top_b, max_m = *top_m;
  double sum_b = 0.0, sum_m = 0.0, differences = 0.0;
  for (size_t i = 0; i < baseline.size(); ++i) {
    const double b = baseline[i], m = model[i], weight = std::exp(b - max_b);
    sum_b += weight;
    sum_m += std::exp(m - max_m);
    if (weight != 0.0) differences += weight * (b - m);
  }
  const double log_b = max_b + std::log(sum_b), log_m = max_m + std::log(sum_m);
  Row row;
  row.kl = std::max(0.0, differences / sum_b - log_b + log_m);  // rounding can bring it below
  row.agree = top_b - baseline.begin() == top_m - model.begin();
  if (next >= 0) row.excess_nll = (baseline[next] - log_b) - (model[next] - log_m);
  return row;
}

}  // namespace

void DivergenceMeter::add(Backend& backend, std::span<const float> baseline, std::span<const float> model,
                          int64_t vocab, std::span<const int32_t> next) {
  MILLRACE_CHECK(baseline.size() == model.size() &&
                 baseline.size() == next.size() * static_cast<size_t>(vocab));
  std::vector<Row> rows(next.size());
  backend.parallel(static_cast<int64_t>(rows.size()), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const auto offset = static_cast<size_t>(r * vocab), count = static_cast<size_t>(vocab);
      rows[r] = compare(baseline.subspan(offset, count), model.subspan(offset, count), next[r]);
    }
  });
  for (size_t r = 0; r < rows.size(); ++r) {
    kl_.push_back(rows[r].kl);
    agreed_ += rows[r].agree ? 1 : 0;
    if (next[r] < 0) continue;
    ++scored_;
    excess_nll_ += rows[r].excess_nll;
  }
}

Divergence DivergenceMeter::result() const {
  Divergence d;
  d.tokens = static_cast<int64_t>(kl_.size());
  if (kl_.empty()) return d;
  std::vector<double> sorted = kl_;
  std::sort(sorted.begin(), sorted.end());
  for (const double kl : sorted) d.mean += kl;
  d.mean /= static_cast<double>(d.tokens);
  d.p99 = sorted[static_cast<size_t>(std::ceil(0.99 * static_cast<double>(d.tokens))) - 1];
  d.max = sorted.back();
  d.top1_agreement = static_cast<double>(agreed_) / static_cast<double>(d.tokens);
  if (scored_ > 0) d.perplexity_ratio = std::exp(excess_nll_ / static_cast<double>(scored_));
  return d;
}

std::vector<float> all_logits(Runtime& runtime, std::span<const int32_t> tokens) {
  std::vector<float> out;
  kv::Sequence sequence = runtime.make_sequence();
  const auto step = static_cast<size_t>(std::min(runtime.spec().max_tokens, runtime.spec().max_logit_rows));
  while (!tokens.empty()) {
    const size_t n = std::min(step, tokens.size());
    const StepInput input{&sequence, tokens.first(n), StepInput::Want::kAll};
    const std::span<const float> rows = runtime.step({&input, 1});
    out.insert(out.end(), rows.begin(), rows.end());
    tokens = tokens.subspan(n);
  }
  return out;
}

}  // namespace millrace
