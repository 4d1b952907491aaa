// RMSNorm, plainly: the oracle of every kernel's test.
#pragma once

#include <cstdint>

namespace millrace::reference {

// y = x / sqrt(mean(x^2) + eps) * weight over `size` values, summed in double. y may be x.
// weight: [size], or absent
void rmsnorm(const float* x, const float* weight, float eps, int64_t size, float* y);

// y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias; bias: [size], or absent
void layernorm(const float* x, const float* weight, const float* bias, float eps, int64_t size, float* y);

}  // namespace millrace::reference
