// The searches behind the encoders: which scale (and minimum) makes the codes of a block differ least from
// its values, by the weighted sum of squares. Four blocks at a time, one per lane (float4.h).
//
// A rounding to codes is fixed by an inverse scale; once the codes are known the best scale (and minimum) for
// them is a least-squares problem with a closed solution, and so is its error. Each search tries some inverse
// scales around the one that makes the extremes fit exactly, and keeps the solution of least error.
#pragma once

#include "kernels/cpu/quant/float4.h"

namespace millrace::quant {

// Inverse scales tried are (top + kFitStep * k) / extreme, |k| <= kFitSteps. Finer or wider grids gain less
// than 1% of the error on Gaussian blocks.
inline constexpr int kFitSteps = 4;
inline constexpr float kFitStep = 0.22f;

// x ~ scale * q, q in [-half, half - 1]. The scale has the sign that gives the extreme value the code -half.
template <int kCount>
Float4 fit_signed(const Float4* x, const Float4* w, float half) {
  Float4 extreme = all4(0.0f), highest = extreme;
  for (int j = 0; j < kCount; ++j) {
    const Int4 larger = abs4(x[j]) > highest;
    highest = select(larger, abs4(x[j]), highest);
    extreme = select(larger, x[j], extreme);
  }
  const Float4 unit = divide_or_zero(all4(-1.0f), extreme);
  Float4 best_gain = all4(0.0f), best = divide_or_zero(extreme, all4(-half));
  // sum w (x - s q)^2 is least at s = xq / qq, and is then xx - xq^2 / qq: the largest gain xq^2 / qq wins.
  const auto attempt = [&](Float4 inverse) {
    Float4 xq = all4(0.0f), qq = xq;
    for (int j = 0; j < kCount; ++j) {
      const Float4 q = clamp4(round4(x[j] * inverse), -half, half - 1.0f), wq = w[j] * q;
      xq += wq * x[j];
      qq += wq * q;
    }
    const Float4 scale = divide_or_zero(xq, qq), gain = scale * xq;
    const Int4 better = gain > best_gain;
    best_gain = select(better, gain, best_gain);
    best = select(better, scale, best);
  };
  for (int k = -kFitSteps; k <= kFitSteps; ++k) {
    attempt(unit * all4(half + kFitStep * static_cast<float>(k)));
  }
  attempt(divide_or_zero(all4(1.0f), best));  // once more from the solution itself
  return best;
}

struct ScaleMin {
  Float4 scale, min;  // x ~ scale * q + min
};

// x ~ scale * q + min, q in [0, top]; min <= 0 when `below_zero` (the K types subtract theirs).
template <int kCount>
ScaleMin fit_above_min(const Float4* x, const Float4* w, float top, bool below_zero) {
  Float4 low = x[0], high = x[0], sum_w = all4(0.0f), sum_x = sum_w;
  for (int j = 0; j < kCount; ++j) {
    low = min4(low, x[j]);
    high = max4(high, x[j]);
    sum_w += w[j];
    sum_x += w[j] * x[j];
  }
  if (below_zero) low = min4(low, all4(0.0f));
  const Float4 unit = divide_or_zero(all4(1.0f), high - low);
  ScaleMin best = {(high - low) / all4(top), low};
  Float4 best_gain = all4(-3.0e38f);
  const auto attempt = [&](Float4 inverse, Float4 from) {
    Float4 sum_q = all4(0.0f), qq = sum_q, xq = sum_q;
    for (int j = 0; j < kCount; ++j) {
      const Float4 q = clamp4(round4((x[j] - from) * inverse), 0.0f, top), wq = w[j] * q;
      sum_q += wq;
      qq += wq * q;
      xq += wq * x[j];
    }
    // Least squares in (scale, min); where the codes are all alike only the minimum is left.
    const Float4 det = sum_w * qq - sum_q * sum_q;
    Float4 scale = divide_or_zero(sum_w * xq - sum_x * sum_q, det);
    Float4 min = divide_or_zero(sum_x - scale * sum_q, sum_w);
    if (below_zero) {
      const Int4 positive = min > all4(0.0f);
      scale = select(positive, divide_or_zero(xq, qq), scale);
      min = select(positive, all4(0.0f), min);
    }
    const Int4 usable = scale >= all4(0.0f);
    const Float4 gain = scale * (all4(2.0f) * (xq - min * sum_q) - scale * qq) +
                        min * (all4(2.0f) * sum_x - min * sum_w);  // xx minus the error
    const Int4 better = (gain > best_gain) & usable;
    best_gain = select(better, gain, best_gain);
    best = {select(better, scale, best.scale), select(better, min, best.min)};
  };
  for (int k = -kFitSteps; k <= kFitSteps; ++k) {
    attempt(unit * all4(top + kFitStep * static_cast<float>(k)), low);
  }
  attempt(divide_or_zero(all4(1.0f), best.scale), best.min);
  return best;
}

}  // namespace millrace::quant
