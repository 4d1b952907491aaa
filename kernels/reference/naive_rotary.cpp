#include "kernels/reference/naive_rotary.h"

#include <cmath>

namespace millrace::reference {

double growth_at(const QueryGrowth& growth, int32_t position) {
  const double steps = std::floor((position + growth.offset) / static_cast<double>(growth.every));
  return 1.0 + growth.scale * std::log1p(steps);
}

void grow_query(const QueryGrowth& growth, int32_t position, int64_t size, float* q) {
  const double by = growth_at(growth, position);
  for (int64_t i = 0; i < size; ++i) q[i] = static_cast<float>(q[i] * by);
}

void rotate(const Rotary& rotary, int32_t position, float* x) { rotate_on_axes(rotary, {}, &position, x); }

void rotate_on_axes(const Rotary& rotary, std::span<const uint8_t> axes, const int32_t* positions, float* x) {
  const auto half = static_cast<int64_t>(rotary.inv_freq.size());
  for (int64_t i = 0; i < half; ++i) {
    const double position = positions[axes.empty() ? 0 : axes[static_cast<size_t>(i)]];
    const double angle = position * rotary.inv_freq[i];
    const double c = std::cos(angle) * rotary.magnitude, s = std::sin(angle) * rotary.magnitude;
    float& a = rotary.interleaved ? x[2 * i] : x[i];
    float& b = rotary.interleaved ? x[2 * i + 1] : x[i + half];
    const double a0 = a, b0 = b;
    a = static_cast<float>(a0 * c - b0 * s);
    b = static_cast<float>(b0 * c + a0 * s);
  }
}

}  // namespace millrace::reference
