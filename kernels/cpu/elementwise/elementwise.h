// The small operations around the products: activation functions, sums of rows, exp, norms. All go sixteen
// lanes at a time over rows of any length.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/simd/exp.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/simd/tanh.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

inline V16 sigmoid16(V16 x) {
  const V16 one = Simd::broadcast(1.0f);
  return Simd::div(one, Simd::add(one, exp16_within(Simd::sub(Simd::zero(), x))));
}

// y[i] = op(a[i], b[i]), 16 at a time.
template <class Op>
void each16(const float* a, const float* b, int64_t size, float* y, Op op) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) Simd::store(y + i, op(Simd::load(a + i), Simd::load(b + i)));
  if (i < size) {
    float last[kLanes];
    Simd::store(last, op(load_tail<LoadF32>(a + i, size - i), load_tail<LoadF32>(b + i, size - i)));
    __builtin_memcpy(y + i, last, static_cast<size_t>(size - i) * sizeof(float));
  }
}

void silu_mul(const float* gate, const float* up, int64_t size, float* y) {
  each16(gate, up, size, y, [](V16 g, V16 u) { return Simd::mul(Simd::mul(g, sigmoid16(g)), u); });
}

void clamped_swiglu(const float* gate, const float* up, float alpha, float limit, int64_t size, float* y) {
  const V16 high = Simd::broadcast(limit), low = Simd::broadcast(-limit), one = Simd::broadcast(1.0f);
  const V16 a = Simd::broadcast(alpha);
  each16(gate, up, size, y, [&](V16 g, V16 u) {
    g = Simd::min(g, high);
    u = Simd::min(Simd::max(u, low), high);
    return Simd::mul(Simd::mul(g, sigmoid16(Simd::mul(a, g))), Simd::add(u, one));
  });
}

void gelu_all(const float* x, int64_t size, float* y) {
  each16(x, x, size, y, [](V16 v, V16) { return gelu16(v); });
}

void gelu_tanh_all(const float* x, int64_t size, float* y) {
  each16(x, x, size, y, [](V16 v, V16) { return gelu_tanh16(v); });
}

void multiply(const float* a, const float* b, int64_t size, float* y) {
  each16(a, b, size, y, [](V16 v, V16 w) { return Simd::mul(v, w); });
}

void softcap_all(const float* x, float cap, int64_t size, float* y) {
  each16(x, x, size, y, [cap](V16 v, V16) { return softcap16(v, cap); });
}

void scale_add(float* y, float a, const float* x, float b, int64_t size) {
  const V16 by_a = Simd::broadcast(a), by_b = Simd::broadcast(b);
  each16(y, x, size, y, [&](V16 to, V16 from) { return Simd::fma(from, by_b, Simd::mul(to, by_a)); });
}

void exp_all(const float* x, int64_t size, float* y) {
  each16(x, x, size, y, [](V16 v, V16) { return exp16(v); });
}

void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* y) {
  V16 squares = Simd::zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const V16 v = Simd::load(x + i);
    squares = Simd::fma(v, v, squares);
  }
  if (i < size) {
    const V16 v = load_tail<LoadF32>(x + i, size - i);
    squares = Simd::fma(v, v, squares);
  }
  const float mean = Simd::reduce_sum(squares) / static_cast<float>(size);
  const V16 scale = Simd::broadcast(1.0f / __builtin_sqrtf(mean + eps));
  if (weight == nullptr) {
    each16(x, x, size, y, [&](V16 v, V16) { return Simd::mul(v, scale); });
  } else {
    each16(x, weight, size, y, [&](V16 v, V16 w) { return Simd::mul(Simd::mul(v, scale), w); });
  }
}

// Two passes: the sum of squares is of what is left without the mean.
void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t size, float* y) {
  const auto sum_of = [&](auto term) {
    V16 sum = Simd::zero();
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) sum = Simd::add(sum, term(Simd::load(x + i)));
    float total = Simd::reduce_sum(sum);
    for (; i < size; ++i) {  // what is left, in order: lanes beyond the end would not be zero
      float last[kLanes];
      Simd::store(last, term(Simd::broadcast(x[i])));
      total += last[0];
    }
    return total;
  };
  const float mean = sum_of([](V16 v) { return v; }) / static_cast<float>(size);
  const V16 all_mean = Simd::broadcast(mean);
  const float variance = sum_of([&](V16 v) {
                           const V16 off = Simd::sub(v, all_mean);
                           return Simd::mul(off, off);
                         }) /
                         static_cast<float>(size);
  const V16 scale = Simd::broadcast(1.0f / __builtin_sqrtf(variance + eps));
  each16(x, weight, size, y,
         [&](V16 v, V16 w) { return Simd::mul(Simd::mul(Simd::sub(v, all_mean), scale), w); });
  if (bias != nullptr) each16(y, bias, size, y, [](V16 v, V16 b) { return Simd::add(v, b); });
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
