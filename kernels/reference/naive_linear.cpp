#include "kernels/reference/naive_linear.h"

#include <algorithm>
#include <vector>

#include "kernels/quant/codec.h"

namespace millrace::reference {

int64_t out_rows(const LinearWeights& weights) {
  const TensorView& w = *weights.matrix;
  return w.rank == 3 ? w.shape[1] : w.rows();
}

void linear(const LinearWeights& weights, int64_t expert, const float* x, int64_t count, float* y) {
  const int64_t rows = out_rows(weights), cols = weights.matrix->cols();
  // Four rows side by side: each is summed in order, and none waits for its own last addition.
  constexpr int64_t kAtOnce = 4;
  std::vector<float> row(static_cast<size_t>(cols * kAtOnce));  // [kAtOnce][cols]
  for (int64_t first = 0; first < rows; first += kAtOnce) {
    const int64_t some = std::min(kAtOnce, rows - first);
    for (int64_t i = 0; i < some; ++i) {
      quant::dequantize_row(*weights.matrix, expert * rows + first + i, row.data() + i * cols);
    }
    const float *w0 = row.data(), *w1 = w0 + cols, *w2 = w1 + cols, *w3 = w2 + cols;
    for (int64_t t = 0; t < count; ++t) {
      double sum[kAtOnce] = {};
      for (int64_t c = 0; c < cols; ++c) {
        const double with = x[t * cols + c];
        sum[0] += w0[c] * with;
        sum[1] += w1[c] * with;
        sum[2] += w2[c] * with;
        sum[3] += w3[c] * with;
      }
      for (int64_t i = 0; i < some; ++i) {
        const double bias = weights.bias != nullptr ? weights.bias[expert * rows + first + i] : 0.0;
        y[t * rows + first + i] = static_cast<float>(sum[i] + bias);
      }
    }
  }
}

}  // namespace millrace::reference
