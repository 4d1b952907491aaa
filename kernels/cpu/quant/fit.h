// The searches behind the encoders: which scale (and minimum) makes the codes of a block differ least from
// its values, by the weighted sum of squares. Four blocks at a time, one per lane (lanes.h).
//
// A rounding to codes is fixed by an inverse scale; once the codes are known the best scale (and minimum) for
// them is a least-squares problem with a closed solution, and so is its error. Each search tries some inverse
// scales around the one that makes the extremes fit exactly, and keeps the solution of least error.
#pragma once

#include "kernels/cpu/quant/lanes.h"

namespace millrace::quant {

// Inverse scales tried are (top + kFitStep * k) / extreme, |k| <= kFitSteps. Finer or wider grids gain less
// than 1% of the error on Gaussian blocks.
inline constexpr int kFitSteps = 4;
inline constexpr float kFitStep = 0.22f;

// x ~ scale * q, q in [-half, half - 1]. The scale has the sign that gives the extreme value the code -half.
template <int kCount>
Lanes fit_signed(const Lanes* x, const Lanes* w, float half) {
  Lanes extreme = all_lanes(0.0f), most = extreme;
  for (int j = 0; j < kCount; ++j) {
    const LaneInts larger = abs_lanes(x[j]) > most;
    most = select(larger, abs_lanes(x[j]), most);
    extreme = select(larger, x[j], extreme);
  }
  const Lanes unit = divide_or_zero(all_lanes(-1.0f), extreme);
  Lanes best_gain = all_lanes(0.0f), best = divide_or_zero(extreme, all_lanes(-half));
  // sum w (x - s q)^2 is least at s = xq / qq, and is then xx - xq^2 / qq: the largest gain xq^2 / qq wins.
  const auto attempt = [&](Lanes inverse) {
    Lanes xq = all_lanes(0.0f), qq = xq;
    for (int j = 0; j < kCount; ++j) {
      const Lanes q = clamp_lanes(round_lanes(x[j] * inverse), -half, half - 1.0f), wq = w[j] * q;
      xq += wq * x[j];
      qq += wq * q;
    }
    const Lanes scale = divide_or_zero(xq, qq), gain = scale * xq;
    const LaneInts better = gain > best_gain;
    best_gain = select(better, gain, best_gain);
    best = select(better, scale, best);
  };
  for (int k = -kFitSteps; k <= kFitSteps; ++k) {
    attempt(unit * all_lanes(half + kFitStep * static_cast<float>(k)));
  }
  attempt(divide_or_zero(all_lanes(1.0f), best));  // once more from the solution itself
  return best;
}

struct ScaleMin {
  Lanes scale, min;  // x ~ scale * q + min
};

// x ~ scale * q + min, q in [0, top]; min <= 0 when `below_zero` (the K types subtract theirs).
template <int kCount>
ScaleMin fit_above_min(const Lanes* x, const Lanes* w, float top, bool below_zero) {
  Lanes low = x[0], high = x[0], sum_w = all_lanes(0.0f), sum_x = sum_w;
  for (int j = 0; j < kCount; ++j) {
    low = lane_min(low, x[j]);
    high = lane_max(high, x[j]);
    sum_w += w[j];
    sum_x += w[j] * x[j];
  }
  if (below_zero) low = lane_min(low, all_lanes(0.0f));
  const Lanes unit = divide_or_zero(all_lanes(1.0f), high - low);
  ScaleMin best = {(high - low) / all_lanes(top), low};
  Lanes best_gain = all_lanes(-3.0e38f);
  const auto attempt = [&](Lanes inverse, Lanes from) {
    Lanes sum_q = all_lanes(0.0f), qq = sum_q, xq = sum_q;
    for (int j = 0; j < kCount; ++j) {
      const Lanes q = clamp_lanes(round_lanes((x[j] - from) * inverse), 0.0f, top), wq = w[j] * q;
      sum_q += wq;
      qq += wq * q;
      xq += wq * x[j];
    }
    // Least squares in (scale, min); where the codes are all alike only the minimum is left.
    const Lanes det = sum_w * qq - sum_q * sum_q;
    Lanes scale = divide_or_zero(sum_w * xq - sum_x * sum_q, det);
    Lanes min = divide_or_zero(sum_x - scale * sum_q, sum_w);
    if (below_zero) {
      const LaneInts positive = min > all_lanes(0.0f);
      scale = select(positive, divide_or_zero(xq, qq), scale);
      min = select(positive, all_lanes(0.0f), min);
    }
    const LaneInts usable = scale >= all_lanes(0.0f);
    const Lanes gain = scale * (all_lanes(2.0f) * (xq - min * sum_q) - scale * qq) +
                       min * (all_lanes(2.0f) * sum_x - min * sum_w);  // xx minus the error
    const LaneInts better = (gain > best_gain) & usable;
    best_gain = select(better, gain, best_gain);
    best = {select(better, scale, best.scale), select(better, min, best.min)};
  };
  for (int k = -kFitSteps; k <= kFitSteps; ++k) {
    attempt(unit * all_lanes(top + kFitStep * static_cast<float>(k)), low);
  }
  attempt(divide_or_zero(all_lanes(1.0f), best.scale), best.min);
  return best;
}

}  // namespace millrace::quant
