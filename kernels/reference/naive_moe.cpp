#include "kernels/reference/naive_moe.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace millrace::reference {
namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

}  // namespace

float activate(const FeedForward& op, float gate, float up) {
  using enum Activation;
  if (op.activation == kSilu) return static_cast<float>(gate * sigmoid(gate) * up);
  if (op.activation == kGelu) return static_cast<float>(gate * 0.5 * std::erfc(-gate / std::sqrt(2.0)) * up);
  if (op.activation == kGeluTanh) {
    const double x = gate, inner = std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x);
    return static_cast<float>(0.5 * x * (1.0 + std::tanh(inner)) * up);
  }
  if (op.activation == kReluSquared) {
    const double x = std::max(gate, 0.0f);
    return static_cast<float>(x * x * up);
  }
  const double g = std::min(gate, op.limit), u = std::clamp(up, -op.limit, op.limit);
  return static_cast<float>(g * sigmoid(op.alpha * g) * (u + 1.0));
}

void feed_forward(const FeedForward& op, const float* x, int64_t count, float* y) {
  std::vector<float> gate(static_cast<size_t>(count * out_rows(op.gate))), up(gate.size(), 1.0f);
  linear(op.gate, 0, x, count, gate.data());
  if (op.up.matrix != nullptr) linear(op.up, 0, x, count, up.data());
  for (size_t i = 0; i < gate.size(); ++i) gate[i] = activate(op, gate[i], up[i]);
  linear(op.down, 0, gate.data(), count, y);
}

void route_top_k(const float* scores, int64_t experts, int64_t k, SoftmaxOver softmax_over, int32_t* chosen,
                 float* weights, int groups, int groups_chosen) {
  const auto key = [&](int32_t e) {
    return std::isnan(scores[e]) ? -std::numeric_limits<float>::infinity() : scores[e];
  };
  const int64_t per_group = experts / groups;
  std::vector<int32_t> best(static_cast<size_t>(groups));  // expert of each group
  for (int64_t e = 0; e < experts; ++e) {
    int32_t& of = best[static_cast<size_t>(e / per_group)];
    if (e % per_group == 0 || key(static_cast<int32_t>(e)) > key(of)) of = static_cast<int32_t>(e);
  }
  std::stable_sort(best.begin(), best.end(), [&](int32_t a, int32_t b) { return key(a) > key(b); });
  std::vector<int32_t> order;
  for (int32_t e = 0; e < experts; ++e) {
    const auto same_group = [&](int32_t other) { return other / per_group == e / per_group; };
    if (std::any_of(best.begin(), best.begin() + groups_chosen, same_group)) order.push_back(e);
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return key(a) > key(b); });
  const double top = scores[order[0]];
  double chosen_sum = 0, all_sum = 0;
  for (int64_t e = 0; e < experts; ++e) all_sum += std::exp(scores[e] - top);
  for (int64_t i = 0; i < k; ++i) chosen_sum += std::exp(scores[order[i]] - top);
  const double sum = softmax_over == SoftmaxOver::kAll ? all_sum : chosen_sum;
  for (int64_t i = 0; i < k; ++i) {
    chosen[i] = order[i];
    weights[i] = static_cast<float>(std::exp(scores[order[i]] - top) / sum);
  }
}

void route_sigmoid(const float* scores, int64_t experts, int64_t k, const SigmoidRouting& op, int32_t* chosen,
                   float* weights) {
  const double never = -std::numeric_limits<double>::infinity();
  const int64_t per_group = experts / op.groups;
  std::vector<double> key(static_cast<size_t>(experts));
  for (int64_t e = 0; e < experts; ++e) {
    const double weight = sigmoid(scores[e]) + (op.bias == nullptr ? 0.0 : op.bias[e]);
    key[static_cast<size_t>(e)] = std::isnan(weight) ? never : weight;
  }
  const auto largest = [](std::vector<double> values, int64_t count) {  // their places, ties to the lower
    std::vector<int32_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return values[a] > values[b]; });
    order.resize(static_cast<size_t>(count));
    return order;
  };
  if (op.groups > 1) {
    std::vector<double> group_key;
    for (int64_t g = 0; g < op.groups; ++g) {
      const std::vector<double> of(key.begin() + g * per_group, key.begin() + (g + 1) * per_group);
      double sum = 0;
      for (const int32_t e : largest(of, std::min<int64_t>(2, per_group))) sum += of[static_cast<size_t>(e)];
      group_key.push_back(sum);
    }
    const std::vector<int32_t> open = largest(group_key, op.groups_chosen);
    for (int64_t e = 0; e < experts; ++e) {
      if (std::find(open.begin(), open.end(), e / per_group) == open.end())
        key[static_cast<size_t>(e)] = never;
    }
  }
  const std::vector<int32_t> order = largest(key, k);
  double sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += sigmoid(scores[order[i]]);
  for (int64_t i = 0; i < k; ++i) {
    chosen[i] = order[i];
    weights[i] = static_cast<float>(sigmoid(scores[order[i]]) / (op.renormalize ? sum + 1e-20 : 1.0));
  }
}

void experts_add(const FeedForward& op, const int32_t* chosen, const float* weights, int64_t k,
                 const float* x, float* y, bool weigh_input, const BehindExpertProduct& behind) {
  const int64_t hidden = out_rows(op.down), inner = out_rows(op.gate);
  std::vector<float> gate(static_cast<size_t>(inner)), up(static_cast<size_t>(inner), 1.0f),
      down(static_cast<size_t>(hidden));
  std::vector<double> sum(static_cast<size_t>(hidden), 0.0);
  std::vector<float> weighed(x, x + op.gate.matrix->cols());
  for (int64_t slot = 0; slot < k; ++slot) {
    if (chosen[slot] < 0) continue;
    if (weigh_input) {
      for (size_t i = 0; i < weighed.size(); ++i) weighed[i] = x[i] * weights[slot];
    }
    const auto product = [&](ExpertProduct which, const LinearWeights& by, const float* in, float* out) {
      linear(by, chosen[slot], in, 1, out);
      if (behind) behind(which, chosen[slot], in, out);
    };
    product(ExpertProduct::kGate, op.gate, weighed.data(), gate.data());
    if (op.up.matrix != nullptr) product(ExpertProduct::kUp, op.up, weighed.data(), up.data());
    for (int64_t i = 0; i < inner; ++i) gate[i] = activate(op, gate[i], up[i]);
    product(ExpertProduct::kDown, op.down, gate.data(), down.data());
    for (int64_t i = 0; i < hidden; ++i) sum[i] += down[i] * (weigh_input ? 1.0 : weights[slot]);
  }
  for (int64_t i = 0; i < hidden; ++i) y[i] = static_cast<float>(y[i] + sum[i]);
}

}  // namespace millrace::reference
