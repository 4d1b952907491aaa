// For tests: picking a token from one row as plainly as it can be written (everything sorted, nothing shared
// with the sampler but base/sampling_math.h); and an executor that samples with it on top of one that does
// not, so that the engine's ways with such a device are tested without one.
#pragma once

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "backend/forwarding_executor.h"

namespace millrace::test {

struct NaiveSample {
  int32_t token = SampledRow::kLeft;
  float chosen = 0.0f, largest = 0.0f;
  uint64_t units = 0;
  std::vector<SampledRow::Top> top;
};

// Ids by falling value, equal ones by rising id.
inline std::vector<int32_t> order_of(std::span<const float> values) {
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  return order;
}

inline std::vector<float> naive_weights(std::span<const float> logits, float largest, float scale) {
  std::vector<float> weights;
  for (const float x : logits) weights.push_back(sampling::weight_of(x, largest, scale));
  return weights;
}

inline std::vector<float> naive_adjusted(const SampleRow& row, std::span<const float> logits) {
  std::vector<float> x(logits.begin(), logits.end());
  for (const auto& [token, times] : row.counted) {
    float& logit = x[static_cast<size_t>(token)];
    logit = sampling::penalized(logit, times, row.repetition_penalty, row.presence_penalty,
                                row.frequency_penalty);
  }
  for (const auto& [token, bias] : row.bias) x[static_cast<size_t>(token)] += bias;
  for (size_t t = 0; !row.allowed.empty() && t < x.size(); ++t) {
    if ((row.allowed[t / 64] >> (t % 64) & 1) == 0) x[t] = -std::numeric_limits<float>::infinity();
  }
  return x;
}

inline int32_t naive_draw(const SampleRow& row, const std::vector<float>& weights) {
  std::vector<int32_t> order = order_of(weights);
  while (!order.empty() && weights[static_cast<size_t>(order.back())] == 0.0f) order.pop_back();
  if (row.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(row.top_k)));
  const auto units = [&](int32_t id) { return sampling::units_of(weights[static_cast<size_t>(id)]); };
  const auto sum = [&] {
    uint64_t total = 0;
    for (const int32_t id : order) total += units(id);
    return total;
  };
  if (row.top_p < 1.0f) {
    const uint64_t mass = sampling::units_of_mass(row.top_p, sum());
    uint64_t reached = 0;
    size_t kept = 0;
    while (reached < mass) reached += units(order[kept++]);
    order.resize(kept);
  }
  std::erase_if(order, [&](int32_t id) { return weights[static_cast<size_t>(id)] < row.min_p; });
  uint64_t left = sampling::drawn_unit(row.uniform, sum());
  std::sort(order.begin(), order.end());
  for (const int32_t id : order) {
    if (left < units(id)) return id;
    left -= units(id);
  }
  return SampledRow::kNothing;
}

inline NaiveSample naive_sample(const SampleRow& row, std::span<const float> logits) {
  NaiveSample out;
  if (!row.wanted) return out;
  const auto nan = std::find_if(logits.begin(), logits.end(), [](float x) { return std::isnan(x); });
  if (nan != logits.end()) {
    out.token = SampledRow::kNotANumber;
    return out;
  }
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  const std::vector<float> x = naive_adjusted(row, logits);
  const auto best = std::max_element(x.begin(), x.end());
  out.token = *best == kLowest ? SampledRow::kNothing : static_cast<int32_t>(best - x.begin());
  if (out.token < 0) return out;
  if (row.draw) out.token = naive_draw(row, naive_weights(x, *best, row.scale));
  if (row.logprobs < 0) return out;
  out.chosen = logits[static_cast<size_t>(out.token)];
  out.largest = *std::max_element(logits.begin(), logits.end());
  for (const float w : naive_weights(logits, out.largest, 1.0f)) out.units += sampling::units_of(w);
  for (const int32_t id : order_of(logits)) {
    const float logit = logits[static_cast<size_t>(id)];
    if (static_cast<int32_t>(out.top.size()) == row.logprobs || logit == kLowest) break;
    out.top.push_back({id, logit});
  }
  return out;
}

// Leaves rows with many logprobs to the host, as devices do.
class SamplingExecutor final : public ForwardingExecutor {
 public:
  using ForwardingExecutor::ForwardingExecutor;

  int steps_ahead = 0, rows_left = 0;  // begun before the last tokens were asked for; read as logits

  void begin(const Batch& batch) override {
    tokens_.assign(batch.tokens.begin(), batch.tokens.end());
    for (size_t i = 0; i < batch.sampled_rows.size(); ++i) {
      if (batch.sampled_rows[i] < 0) continue;
      tokens_[i] = std::max(0, steps_.back().tokens[static_cast<size_t>(batch.sampled_rows[i])].token);
    }
    if (!batch.sampled_rows.empty() && pending_ > 0) ++steps_ahead;
    Batch known = batch;
    known.tokens = tokens_;
    known.sampled_rows = {};
    rows_ = batch.logit_rows.size();
    inner().begin(known);
  }
  bool samples() const override { return true; }
  bool sample(std::span<const SampleRow> rows) override {
    if (rows.size() != rows_ || pending_ == 2) throw std::logic_error("sample: rows or order are wrong");
    const std::span<const float> logits = inner().logits();
    const size_t vocab = rows.empty() ? 0 : logits.size() / rows.size();
    Step& step = steps_.emplace_back();
    for (size_t r = 0; r < rows.size(); ++r) {
      SampleRow row = rows[r];
      if (row.logprobs > SampleRow::kMostLogprobs) row.wanted = false;
      step.tokens.push_back(naive_sample(row, logits.subspan(r * vocab, vocab)));
    }
    for (const NaiveSample& s : step.tokens) {
      step.rows.push_back({s.token, s.chosen, s.largest, s.units, s.top});
    }
    if (steps_.size() > 3) steps_.pop_front();
    ++pending_;
    return true;
  }
  std::span<const SampledRow> sampled() override {
    if (pending_ == 0) throw std::logic_error("sampled: nothing was asked for");
    return steps_[steps_.size() - static_cast<size_t>(pending_--)].rows;
  }
  std::span<const float> logits_of(std::span<const int32_t> rows) override {
    rows_left += static_cast<int>(rows.size());
    return inner().logits();
  }

 private:
  struct Step {
    std::vector<NaiveSample> tokens;
    std::vector<SampledRow> rows;
  };
  size_t rows_ = 0;
  std::vector<int32_t> tokens_;
  std::deque<Step> steps_;
  int pending_ = 0;
};

}  // namespace millrace::test
