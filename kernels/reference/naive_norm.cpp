#include "kernels/reference/naive_norm.h"

#include <cmath>

namespace millrace::reference {

void rmsnorm(const float* x, const float* weight, float eps, int64_t size, float* y) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += static_cast<double>(x[i]) * x[i];
  const double scale = 1.0 / std::sqrt(sum / static_cast<double>(size) + eps);
  for (int64_t i = 0; i < size; ++i)
    y[i] = static_cast<float>(x[i] * scale * (weight == nullptr ? 1.0 : weight[i]));
}

void layernorm(const float* x, const float* weight, const float* bias, float eps, int64_t size, float* y) {
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < size; ++i) sum += x[i];
  const double mean = sum / static_cast<double>(size);
  for (int64_t i = 0; i < size; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const double scale = 1.0 / std::sqrt(squares / static_cast<double>(size) + eps);
  for (int64_t i = 0; i < size; ++i) {
    y[i] = static_cast<float>((x[i] - mean) * scale * weight[i] + (bias == nullptr ? 0.0 : bias[i]));
  }
}

}  // namespace millrace::reference
