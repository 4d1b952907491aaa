#include "kernels/reference/naive_linear.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "base/float_bits.h"
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

namespace {

struct Fp8Values {
  std::array<float, 256> of{};
  Fp8Values() {
    for (size_t code = 0; code < of.size(); ++code) of[code] = to_float(Fp8E4M3{static_cast<uint8_t>(code)});
  }
  void decode(const uint8_t* codes, int64_t count, float* values) const {
    for (int64_t i = 0; i < count; ++i) values[i] = of[codes[i]];
  }
};

// Sixteen chains, added up in turn.
float patch_product(const float* a, const float* b, int64_t count) {
  constexpr int64_t kChains = 16;
  float sums[kChains] = {};
  int64_t i = 0;
  for (; i + kChains <= count; i += kChains) {
    for (int64_t c = 0; c < kChains; ++c) sums[c] += a[i + c] * b[i + c];
  }
  for (int64_t c = 0; i + c < count; ++c) sums[c] += a[i + c] * b[i + c];
  float sum = 0.0f;
  for (const float s : sums) sum += s;
  return sum;
}

}  // namespace

void fp8_linear(const quant::Fp8Patches& w, const float* bias, const float* x, int64_t count, float* y) {
  const int64_t cols = w.cols, patches = w.patch_cols();
  const Fp8Values values;
  std::vector<uint8_t> codes(static_cast<size_t>(cols));
  std::vector<float> rows(static_cast<size_t>(count * cols)), scales(static_cast<size_t>(count * patches)),
      weights(static_cast<size_t>(cols));
  for (int64_t t = 0; t < count; ++t) {
    quant::fp8_row(x + t * cols, cols, codes.data(), scales.data() + t * patches);
    values.decode(codes.data(), cols, rows.data() + t * cols);
  }
  for (int64_t r = 0; r < w.rows; ++r) {
    values.decode(w.codes.data() + r * cols, cols, weights.data());
    const float* const own = w.scales.data() + r / quant::kFp8Patch * patches;
    for (int64_t t = 0; t < count; ++t) {
      float total = 0.0f;
      for (int64_t p = 0; p < patches; ++p) {
        const int64_t at = p * quant::kFp8Patch, width = std::min(quant::kFp8Patch, cols - at);
        total = std::fma(patch_product(rows.data() + t * cols + at, weights.data() + at, width),
                         scales[t * patches + p] * own[p], total);
      }
      y[t * w.rows + r] = total + (bias != nullptr ? bias[r] : 0.0f);
    }
  }
}

}  // namespace millrace::reference
