#include "kernels/reference/naive_linear.h"

#include <vector>

#include "kernels/quant/codec.h"

namespace millrace::reference {

int64_t out_rows(const LinearWeights& weights) {
  const TensorView& w = *weights.matrix;
  return w.rank == 3 ? w.shape[1] : w.rows();
}

void linear(const LinearWeights& weights, int64_t expert, const float* x, int64_t count, float* y) {
  const int64_t rows = out_rows(weights), cols = weights.matrix->cols();
  std::vector<float> row(static_cast<size_t>(cols));
  for (int64_t r = 0; r < rows; ++r) {
    quant::dequantize_row(*weights.matrix, expert * rows + r, row.data());
    const double bias = weights.bias != nullptr ? weights.bias[expert * rows + r] : 0.0;
    for (int64_t t = 0; t < count; ++t) {
      double sum = 0;
      for (int64_t c = 0; c < cols; ++c) sum += static_cast<double>(row[c]) * x[t * cols + c];
      y[t * rows + r] = static_cast<float>(sum + bias);
    }
  }
}

void linear_add(const LinearWeights& weights, const float* x, int64_t count, float* y) {
  std::vector<float> product(static_cast<size_t>(count * out_rows(weights)));
  linear(weights, 0, x, count, product.data());
  for (size_t i = 0; i < product.size(); ++i) y[i] += product[i];
}

}  // namespace millrace::reference
