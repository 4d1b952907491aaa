#include "kernels/reference/naive_norm.h"

#include <cmath>

namespace millrace::reference {

void rmsnorm(const float* x, const float* weight, float eps, int64_t size, float* y) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += static_cast<double>(x[i]) * x[i];
  const double scale = 1.0 / std::sqrt(sum / static_cast<double>(size) + eps);
  for (int64_t i = 0; i < size; ++i) y[i] = static_cast<float>(x[i] * scale * weight[i]);
}

}  // namespace millrace::reference
