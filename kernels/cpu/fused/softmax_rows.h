// Softmax of a row and its gradient, scaled copies and sums of rows (embedding).
#pragma once

#include "kernels/cpu/fused/float_rows.h"
#include "kernels/cpu/simd/exp.h"
#include "kernels/cpu/simd/unroll.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// exps: where exp(scale * x - max) goes, [cols], or null. kScaled: scale is not 1.
template <bool kScaled>
RowSum sum_of_exp_row_of(FloatRow x, int64_t cols, float scale, float* exps, FloatRow next) {
  const V16 by = Simd::broadcast(scale);
  const auto scaled = [&](V16 v) __attribute__((always_inline)) { return kScaled ? Simd::mul(v, by) : v; };
  const float least = -__builtin_inff();
  // Behind the last element what becomes the least: an element of the other sign where scale is negative.
  const float fill = scale < 0.0f ? -least : least;
  V16 most = Simd::broadcast(least);
  // Four chains, for a maximum waits for the one before. A NaN may get lost here: the sum has it.
  V16 chains[4] = {most, most, most, most};
  int64_t begin = 0;
  for (; begin + 4 * kLanes <= cols; begin += 4 * kLanes) {
    unroll<4>([&](auto c) __attribute__((always_inline)) {
      chains[c] = Simd::larger(scaled(load16(x, begin + c * kLanes)), chains[c]);
    });
  }
  for (const V16& chain : chains) most = Simd::larger(most, chain);
  for (; begin + kLanes <= cols; begin += kLanes) most = Simd::larger(scaled(load16(x, begin)), most);
  if (begin < cols) {
    // Infinity times zero is no number, behind the last element.
    const Last part{cols - begin};
    most = Simd::larger(scale == 0.0f ? Simd::zero() : scaled(part.load(x, begin, fill)), most);
  }
  const float max = Simd::reduce_max(most);
  const V16 from = Simd::broadcast(max);
  V16 sum = Simd::zero();
  each16_of(cols, [&](const auto& part, int64_t i) {
    prefetch16(next, i);
    const V16 e = part.mask(exp16_below(Simd::sub(scaled(part.load(x, i)), from)));
    sum = Simd::add(sum, e);
    if (exps != nullptr) part.store({exps, MR_F32}, i, e);
  });
  return {max, Simd::reduce_sum(sum)};
}
RowSum sum_of_exp_row(FloatRow x, int64_t cols, float scale, float* exps, FloatRow next) {
  return scale == 1.0f ? sum_of_exp_row_of<false>(x, cols, scale, exps, next)
                       : sum_of_exp_row_of<true>(x, cols, scale, exps, next);
}

void softmax_row(FloatRow x, int64_t cols, float scale, float max, float by, FloatRow y) {
  const V16 scales = Simd::broadcast(scale), from = Simd::broadcast(max), share = Simd::broadcast(by);
  each16_of(cols, [&](const auto& part, int64_t i) {
    const V16 e = exp16_below(Simd::sub(Simd::mul(part.load(x, i), scales), from));
    part.store(y, i, Simd::mul(e, share));
  });
}

void softmax_backward_row(FloatRow y, FloatRow dy, int64_t cols, float scale, FloatRow dx,
                          const FloatRow (&next)[2]) {
  V16 sums = Simd::zero();
  each16_of(cols,
            [&](const auto& part, int64_t i) { sums = Simd::fma(part.load(y, i), part.load(dy, i), sums); });
  const V16 sum = Simd::broadcast(Simd::reduce_sum(sums)), by = Simd::broadcast(scale);
  each16_of(cols, [&](const auto& part, int64_t i) {
    prefetch16(next[0], i);
    prefetch16(next[1], i);
    part.store(dx, i, Simd::mul(Simd::mul(by, part.load(y, i)), Simd::sub(part.load(dy, i), sum)));
  });
}

void scale_row(FloatRow x, int64_t cols, float by, FloatRow y, bool add) {
  const V16 factor = Simd::broadcast(by);
  if (add) {
    each16_of(cols, [&](const auto& part, int64_t i) {
      part.store(y, i, Simd::fma(part.load(x, i), factor, part.load(y, i)));
    });
  } else {
    each16_of(cols,
              [&](const auto& part, int64_t i) { part.store(y, i, Simd::mul(part.load(x, i), factor)); });
  }
}

void sum_rows_row(FloatRow x, int64_t stride, const int32_t* rows, int64_t count, int64_t cols, float by,
                  FloatRow y, bool add) {
  const V16 factor = Simd::broadcast(by);
  const int64_t row_bytes = stride * (x.type == MR_F32 ? 4 : 2);
  each16_of(cols, [&](const auto& part, int64_t i) {
    V16 sum = Simd::zero();
    for (int64_t r = 0; r < count; ++r) {
      const FloatRow row{static_cast<uint8_t*>(x.data) + rows[r] * row_bytes, x.type};
      sum = Simd::add(sum, part.load(row, i));
    }
    part.store(y, i, add ? Simd::fma(sum, factor, part.load(y, i)) : Simd::mul(sum, factor));
  });
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
