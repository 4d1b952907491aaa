#include "kernels/reference/naive_rows.h"

#include <cmath>

#include "base/float_bits.h"

namespace millrace::reference {
namespace {

double sigmoid_of(double x) { return 1.0 / (1.0 + std::exp(-x)); }

}  // namespace

void scale(float by, int64_t size, float* x) {
  for (int64_t i = 0; i < size; ++i) x[i] *= by;
}

void add(float by, const float* from, int64_t size, float* to) {
  for (int64_t i = 0; i < size; ++i) to[i] += by * from[i];
}

void scaled_sum(float factor, const float* x, float by, int64_t size, float* to) {
  for (int64_t i = 0; i < size; ++i) to[i] = factor * (x[i] + by * to[i]);
}

void scale_chosen(const float* scales, const int32_t* chosen, int64_t size, float* weights) {
  for (int64_t i = 0; i < size; ++i) weights[i] *= scales[chosen[i]];
}

void gate(const float* by, int64_t size, float* y) {
  for (int64_t i = 0; i < size; ++i)
    y[i] = static_cast<float>(y[i] / (1.0 + std::exp(-static_cast<double>(by[i]))));
}

void softcap(float cap, int64_t size, float* x) {
  if (cap == 0.0f) return;
  for (int64_t i = 0; i < size; ++i)
    x[i] = static_cast<float>(cap * std::tanh(static_cast<double>(x[i]) / cap));
}

void round_to_bf16(int64_t size, float* x) {
  for (int64_t i = 0; i < size; ++i) x[i] = to_float(to_bfloat16(x[i]));
}

void squash(Squash kind, int64_t size, float* x) {
  if (kind == Squash::kNone) return;
  for (int64_t i = 0; i < size; ++i) {
    const double value = x[i];
    x[i] = static_cast<float>(kind == Squash::kTanh ? std::tanh(value) : sigmoid_of(value));
  }
}

void place_heads(const HeadColumns& columns, const float* row, float* to) {
  for (int32_t h = 0; h < columns.heads; ++h) {
    for (int32_t i = 0; i < columns.dim; ++i)
      to[int64_t{h} * columns.dim + i] = row[columns.at(h) + i] * columns.scale;
  }
}

void multiply_heads(const HeadColumns& by, const float* row, float* to) {
  for (int32_t h = 0; h < by.heads; ++h) {
    for (int32_t i = 0; i < by.dim; ++i) to[int64_t{h} * by.dim + i] *= row[by.at(h) + i];
  }
}

}  // namespace millrace::reference
