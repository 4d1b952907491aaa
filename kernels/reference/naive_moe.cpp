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
  if (op.activation == FeedForward::Activation::kSilu) {
    return static_cast<float>(gate * sigmoid(gate) * up);
  }
  const double g = std::min(gate, op.limit), u = std::clamp(up, -op.limit, op.limit);
  return static_cast<float>(g * sigmoid(op.alpha * g) * (u + 1.0));
}

void feed_forward_add(const FeedForward& op, const float* x, int64_t count, float* y) {
  std::vector<float> gate(static_cast<size_t>(count * out_rows(op.gate))), up(gate.size());
  linear(op.gate, 0, x, count, gate.data());
  linear(op.up, 0, x, count, up.data());
  for (size_t i = 0; i < gate.size(); ++i) gate[i] = activate(op, gate[i], up[i]);
  linear_add(op.down, gate.data(), count, y);
}

void route_top_k(const float* scores, int64_t experts, int64_t k, SoftmaxOver softmax_over, int32_t* chosen,
                 float* weights) {
  std::vector<int32_t> order(static_cast<size_t>(experts));
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](int32_t e) {
    return std::isnan(scores[e]) ? -std::numeric_limits<float>::infinity() : scores[e];
  };
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

void experts_add(const FeedForward& op, const int32_t* chosen, const float* weights, int64_t k,
                 const float* x, float* y) {
  const int64_t hidden = out_rows(op.down), inner = out_rows(op.gate);
  std::vector<float> gate(static_cast<size_t>(inner)), up(gate.size()), down(static_cast<size_t>(hidden));
  std::vector<double> sum(static_cast<size_t>(hidden), 0.0);
  for (int64_t slot = 0; slot < k; ++slot) {
    linear(op.gate, chosen[slot], x, 1, gate.data());
    linear(op.up, chosen[slot], x, 1, up.data());
    for (int64_t i = 0; i < inner; ++i) gate[i] = activate(op, gate[i], up[i]);
    linear(op.down, chosen[slot], gate.data(), 1, down.data());
    for (int64_t i = 0; i < hidden; ++i) sum[i] += static_cast<double>(down[i]) * weights[slot];
  }
  for (int64_t i = 0; i < hidden; ++i) y[i] = static_cast<float>(y[i] + sum[i]);
}

}  // namespace millrace::reference
