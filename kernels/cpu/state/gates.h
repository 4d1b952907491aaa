// Decays of states: log(1 + exp(x)) and exp(x), rounded to float as the C library's doubles are. Many at a
// time in double; those whose error could change the float by the library again.
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/target.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// Both functions below are right to 2^-48 of the value, the library's to 2^-51. Where all that lies so near a
// value rounds to one float, both are that float; one of a million is not so sure.
constexpr double kGateError = 0x1p-46;
// Below, floats are no normal numbers. Above, softplus is its argument.
constexpr double kLeastGate = -80.0, kMostGate = 20.0;

// No loop: the one over many numbers is made of vectors then.
template <class... Rest>
inline double polynomial(double x, double highest, Rest... rest) {
  double p = highest;
  ((p = p * x + rest), ...);
  return p;
}

// Of [kLeastGate, kMostGate]: x = n ln 2 + r, |r| <= ln 2 / 2. What it is beyond means nothing.
inline double exp_in_double(double x) {
  constexpr double kMagic = 0x1.8p52;                       // the sum's last bit is worth 1
  const double shifted = x * 0x1.71547652b82fep0 + kMagic;  // by 1 / ln 2
  const double n = shifted - kMagic;
  const double r =
      (x - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;  // ln 2, exact in 32 bits first
  const double p =
      polynomial(r, 1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0,
                 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0);
  return __builtin_bit_cast(double,
                            __builtin_bit_cast(uint64_t, p) + (__builtin_bit_cast(uint64_t, shifted) << 52));
}

// log(s) of a number no less than 1: s = 2^k m, m in [0.7, 1.42), log m = 2 atanh((m - 1) / (m + 1)).
inline double log_in_double(double s) {
  constexpr uint64_t kHalf = 0x3fe6a09e00000000;  // the bits of sqrt(1 / 2)
  const uint64_t bits = __builtin_bit_cast(uint64_t, s), k = (bits - kHalf) >> 52;
  const double m = __builtin_bit_cast(double, bits - (k << 52));
  const double power = __builtin_bit_cast(double, uint64_t{0x4338000000000000} + k) - 0x1.8p52;  // k
  const double z = (m - 1.0) / (m + 1.0), zz = z * z;
  const double p = polynomial(zz, 1.0 / 23.0, 1.0 / 21.0, 1.0 / 19.0, 1.0 / 17.0, 1.0 / 15.0, 1.0 / 13.0,
                              1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0);
  return power * 0x1.62e42fefa39efp-1 + (2.0 * z + 2.0 * z * (zz * p));
}

// y[i] = log1p(exp(x[i] + bias[i])), of a sum above 20 the sum; bias: zeros where it is null.
void softplus(const float* x, const float* bias, int64_t size, float* y) {
  constexpr int kGatesAtOnce = 32;
  double sum[kGatesAtOnce] = {};
  float low[kGatesAtOnce], high[kGatesAtOnce];
  for (int64_t first = 0; first < size; first += kGatesAtOnce) {
    const int count = size - first < kGatesAtOnce ? static_cast<int>(size - first) : kGatesAtOnce;
    for (int i = 0; i < count; ++i) sum[i] = x[first + i];
    if (bias != nullptr) {
      for (int i = 0; i < count; ++i) sum[i] += bias[first + i];
    }
    for (int i = 0; i < kGatesAtOnce; ++i) {
      const double u = exp_in_double(sum[i]), s = 1.0 + u;
      const double value = log_in_double(s) + (u - (s - 1.0)) / s;
      low[i] = static_cast<float>(value * (1.0 - kGateError));
      high[i] = static_cast<float>(value * (1.0 + kGateError));
    }
    for (int i = 0; i < count; ++i) {
      const double t = sum[i];
      const bool sure = low[i] == high[i] && t > kLeastGate && t < kMostGate;
      y[first + i] =
          sure ? low[i] : static_cast<float>(t > kMostGate ? t : __builtin_log1p(__builtin_exp(t)));
    }
  }
}

// y[i] = exp(x[i]) of sixteen.
inline void exp_rounded(const double* x, float* y) {
  constexpr int kExpsAtOnce = 16;
  float high[kExpsAtOnce];
  for (int i = 0; i < kExpsAtOnce; ++i) {
    const double value = exp_in_double(x[i]);
    y[i] = static_cast<float>(value * (1.0 - kGateError));
    high[i] = static_cast<float>(value * (1.0 + kGateError));
  }
  for (int i = 0; i < kExpsAtOnce; ++i) {
    if (y[i] != high[i] || !(x[i] > kLeastGate && x[i] < kMostGate))
      y[i] = static_cast<float>(__builtin_exp(x[i]));
  }
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
