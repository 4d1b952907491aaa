// Rounding to levels that are not evenly apart, and the search for the scale of a block of such values, in
// the manner of fit_weighted.h: four blocks at a time, one per lane.
#pragma once

#include "kernels/cpu/quant/float4.h"
#include "kernels/quant/blocks.h"

namespace millrace::quant {

// Levels in ascending order, and the code of each.
template <int kCount>
struct Levels {
  float level[kCount];
  uint8_t code[kCount];

  // The nearest level to y; where two are as near, the lower.
  Float4 nearest(Float4 y) const {
    Float4 found = all4(level[0]);
    for (int k = 1; k < kCount; ++k) {
      found = select(y > all4(0.5f * (level[k - 1] + level[k])), all4(level[k]), found);
    }
    return found;
  }
  // The code of a level.
  uint8_t code_of(float value) const {
    int k = 0;
    while (k + 1 < kCount && level[k] != value) ++k;
    return code[k];
  }
};

constexpr Levels<16> make_iq4_levels() {
  Levels<16> levels{};
  for (int k = 0; k < 16; ++k) {
    levels.level[k] = static_cast<float>(kIQ4Levels[k]);
    levels.code[k] = static_cast<uint8_t>(k);
  }
  return levels;
}
inline constexpr Levels<16> kIQ4 = make_iq4_levels();

// Twice the e2m1 values.
inline constexpr Levels<15> kE2M1 = {{-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12},
                                     {15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7}};

// x ~ scale * level. Tried are the scales that bring the extreme value near the lowest level or, by the other
// sign, near the highest, and twice the best scale for the codes that won.
template <int kCount>
Float4 fit_iq4(const Float4* x, const Float4* w) {
  constexpr int kSteps = 4;
  constexpr float kStep = 0.045f;  // of the extreme
  Float4 extreme = all4(0.0f), highest = extreme;
  for (int j = 0; j < kCount; ++j) {
    const Int4 larger = abs4(x[j]) > highest;
    highest = select(larger, abs4(x[j]), highest);
    extreme = select(larger, x[j], extreme);
  }
  const Float4 unit = divide_or_zero(all4(1.0f), extreme);
  Float4 best_gain = all4(0.0f), best = divide_or_zero(extreme, all4(kIQ4.level[0]));
  const auto attempt = [&](Float4 inverse) {
    Float4 xq = all4(0.0f), qq = xq;
    for (int j = 0; j < kCount; ++j) {
      const Float4 q = kIQ4.nearest(x[j] * inverse), wq = w[j] * q;
      xq += wq * x[j];
      qq += wq * q;
    }
    const Float4 scale = divide_or_zero(xq, qq), gain = scale * xq;
    const Int4 better = gain > best_gain;
    best_gain = select(better, gain, best_gain);
    best = select(better, scale, best);
  };
  for (const float end : {kIQ4.level[0], kIQ4.level[15]}) {
    for (int k = -kSteps; k <= kSteps; ++k)
      attempt(unit * all4(end * (1.0f + kStep * static_cast<float>(k))));
  }
  for (int again = 0; again < 2; ++again) attempt(divide_or_zero(all4(1.0f), best));
  return best;
}

}  // namespace millrace::quant
