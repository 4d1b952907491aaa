// Softmax of a row and its gradient, scaled copies and sums of rows (embedding).
#pragma once

#include "kernels/cpu/fused/float_rows.h"
#include "kernels/cpu/simd/exp.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// exps: where exp(scale * x - max) goes, [cols], or null.
RowSum sum_of_exp_row(FloatRow x, int64_t cols, float scale, float* exps) {
  const V16 by = Simd::broadcast(scale);
  const float least = -__builtin_inff();
  // Behind the last element what becomes the least: an element of the other sign where scale is negative.
  const float fill = scale < 0.0f ? -least : least;
  V16 most = Simd::broadcast(least);
  each16_of(cols, [&](const auto& part, int64_t i) {
    const V16 scaled = Simd::mul(part.load(x, i, fill), by);
    if constexpr (requires { part.n; }) {
      if (scale == 0.0f) {  // infinity times zero
        most = Simd::max(most, Simd::zero());
        return;
      }
    }
    most = Simd::max(most, scaled);
  });
  const float max = Simd::reduce_max(most);
  const V16 from = Simd::broadcast(max);
  V16 sum = Simd::zero();
  each16_of(cols, [&](const auto& part, int64_t i) {
    const V16 e = part.mask(exp16_below(Simd::sub(Simd::mul(part.load(x, i), by), from)));
    sum = Simd::add(sum, e);
    if (exps != nullptr) part.store({exps, MR_F32}, i, e);
  });
  return {max, Simd::reduce_sum(sum)};
}

void softmax_row(FloatRow x, int64_t cols, float scale, float max, float by, FloatRow y) {
  const V16 scales = Simd::broadcast(scale), from = Simd::broadcast(max), share = Simd::broadcast(by);
  each16_of(cols, [&](const auto& part, int64_t i) {
    const V16 e = exp16_below(Simd::sub(Simd::mul(part.load(x, i), scales), from));
    part.store(y, i, Simd::mul(e, share));
  });
}

void softmax_backward_row(FloatRow y, FloatRow dy, int64_t cols, float scale, FloatRow dx) {
  V16 sums = Simd::zero();
  each16_of(cols,
            [&](const auto& part, int64_t i) { sums = Simd::fma(part.load(y, i), part.load(dy, i), sums); });
  const V16 sum = Simd::broadcast(Simd::reduce_sum(sums)), by = Simd::broadcast(scale);
  each16_of(cols, [&](const auto& part, int64_t i) {
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
