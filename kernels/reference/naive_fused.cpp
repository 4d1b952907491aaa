#include "kernels/reference/naive_fused.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace millrace::reference {

NormedRow normed(const Row& x, bool layer, double eps) {
  const auto size = static_cast<double>(x.size());
  double mean = 0, squares = 0;
  for (const double v : x) mean += layer ? v / size : 0.0;
  for (const double v : x) squares += (v - mean) * (v - mean);
  NormedRow of{x, mean, 1.0 / std::sqrt(squares / size + eps)};
  for (double& v : of.n) v = (v - mean) * of.rstd;
  return of;
}

Row norm_backward(const NormedRow& of, const Row& dy, const Row& weight, bool layer, Row& dweight,
                  Row& dbias) {
  const size_t cols = dy.size();
  const auto size = static_cast<double>(cols);
  double mean_gn = 0, mean_g = 0;
  for (size_t i = 0; i < cols; ++i) {
    mean_gn += dy[i] * weight[i] * of.n[i] / size;
    mean_g += layer ? dy[i] * weight[i] / size : 0.0;
    dweight[i] += dy[i] * of.n[i];
    dbias[i] += dy[i];
  }
  Row dx(cols);
  for (size_t i = 0; i < cols; ++i) dx[i] = of.rstd * (dy[i] * weight[i] - mean_g - of.n[i] * mean_gn);
  return dx;
}

double gate_value(Gate gate, double x) {
  switch (gate) {
    case Gate::kGelu:
      return x * 0.5 * std::erfc(-x / std::numbers::sqrt2);
    case Gate::kGeluTanh:
      return x * 0.5 * (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
    case Gate::kSilu:
      break;
  }
  return x / (1.0 + std::exp(-x));
}

double gate_slope(Gate gate, double x) {
  constexpr double kStep = 1e-5;  // an error of 1e-10 from either side
  return (gate_value(gate, x + kStep) - gate_value(gate, x - kStep)) / (2 * kStep);
}

double log_sum_exp(const Row& x) {
  const double most = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const double v : x) sum += std::exp(v - most);
  return most + std::log(sum);
}

Row softmax(const Row& x, double scale) {
  Row y = x;
  for (double& v : y) v *= scale;
  const double lse = log_sum_exp(y);
  for (double& v : y) v = std::exp(v - lse);
  return y;
}

Row softmax_backward(const Row& y, const Row& dy, double scale) {
  double sum = 0;
  for (size_t i = 0; i < y.size(); ++i) sum += y[i] * dy[i];
  Row dx(y.size());
  for (size_t i = 0; i < y.size(); ++i) dx[i] = scale * y[i] * (dy[i] - sum);
  return dx;
}

}  // namespace millrace::reference
