// The small operations around the products: activation functions, sums of rows, exp, RMSNorm. All go sixteen
// lanes at a time over rows of any length.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/simd/exp.h"
#include "kernels/cpu/simd/load_float.h"
#include "kernels/cpu/simd/simd.h"
#include "kernels/cpu/tables/kernel_table.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

inline V16 sigmoid16(V16 x) {
  const V16 one = Simd::broadcast(1.0f);
  return Simd::div(one, Simd::add(one, exp16(Simd::sub(Simd::zero(), x))));
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
  each16(x, weight, size, y, [&](V16 v, V16 w) { return Simd::mul(Simd::mul(v, scale), w); });
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
