#include "sample/softmax.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "sample/lanes.h"

namespace millrace {
namespace {

using lanes::D4;
using lanes::F4;
using lanes::I4;
using lanes::kWidth;

constexpr int32_t kLowestKey = std::numeric_limits<int32_t>::min();

// Orders like the float it came from, as a signed integer; NaN orders below everything, -0 with +0.
inline I4 ordered_key(F4 x) {
  const I4 bits = lanes::bits(x + 0.0f);
  const I4 key = bits ^ ((bits >> 31) & 0x7fffffff);
  return lanes::choose(I4(x == x), key, lanes::splat(kLowestKey));
}

inline F4 exp_lanes(F4 x) {
  // e^x = 2^n e^r, n = round(x / ln 2), |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to an integer in the low
  // bits.
  constexpr float kLog2E = 1.44269504f, kRound = 12582912.0f;
  constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;  // ln 2 split: n * high is exact
  const I4 in_range = I4(x >= -87.0f);                                // NaN is not
  const F4 clamped = lanes::choose(in_range, x, lanes::splat(-87.0f));
  const F4 shifted = clamped * kLog2E + kRound;
  const F4 n = shifted - kRound;
  const F4 r = (clamped - n * kLn2High) - n * kLn2Low;
  // Taylor to degree 6: the remainder is below 2e-7 of the value for |r| <= 0.347.
  F4 p = lanes::splat(1.0f / 720.0f);
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // The low bits of `shifted` hold n: moved up to the exponent they multiply by 2^n. n >= -126 here.
  const I4 value = lanes::bits(p) + (lanes::bits(shifted) << 23);
  return lanes::floats(value & in_range);
}

// out[i] = e^((logits[i] - largest) * scale)
void exp_shifted(std::span<const float> logits, float largest, float scale, float* out) {
  size_t i = 0;
  for (; i + 2 * kWidth <= logits.size(); i += 2 * kWidth) {
    const F4 a = lanes::load(logits.data() + i), b = lanes::load(logits.data() + i + kWidth);
    lanes::store(out + i, exp_lanes((a - largest) * scale));
    lanes::store(out + i + kWidth, exp_lanes((b - largest) * scale));
  }
  for (; i < logits.size(); ++i) out[i] = exp_nonpositive((logits[i] - largest) * scale);
}

}  // namespace

float exp_nonpositive(float x) { return exp_lanes(lanes::splat(x))[0]; }

int32_t argmax(std::span<const float> logits) {
  const auto better = [](I4 a, I4 b) { return lanes::choose(I4(a > b), a, b); };
  I4 best = lanes::splat(kLowestKey), best_odd = best;
  size_t i = 0;
  for (; i + 2 * kWidth <= logits.size(); i += 2 * kWidth) {
    best = better(ordered_key(lanes::load(logits.data() + i)), best);
    best_odd = better(ordered_key(lanes::load(logits.data() + i + kWidth)), best_odd);
  }
  for (; i < logits.size(); ++i) best = better(ordered_key(lanes::splat(logits[i])), best);
  best = better(best, best_odd);
  const int32_t largest = std::max(std::max(best[0], best[1]), std::max(best[2], best[3]));
  const float value = std::bit_cast<float>(largest ^ ((largest >> 31) & 0x7fffffff));
  if (largest == kLowestKey || value == -std::numeric_limits<float>::infinity()) return -1;
  return static_cast<int32_t>(std::find(logits.begin(), logits.end(), value) - logits.begin());
}

void softmax_weights(std::span<const float> logits, float largest, float scale, std::vector<float>& out) {
  out.resize(logits.size());
  if (largest == std::numeric_limits<float>::infinity()) {
    for (size_t i = 0; i < logits.size(); ++i) out[i] = logits[i] == largest ? 1.0f : 0.0f;
    return;
  }
  exp_shifted(logits, largest, scale, out.data());
}

double sum_in_order(std::span<const float> weights) {
  // Four chains: one alone would wait for each addition to finish.
  D4 a{}, b{}, c{}, d{};
  const float* w = weights.data();
  const float* const end = w + weights.size();
  for (; end - w >= 16; w += 16) {
    a += __builtin_convertvector(lanes::load(w), D4);
    b += __builtin_convertvector(lanes::load(w + 4), D4);
    c += __builtin_convertvector(lanes::load(w + 8), D4);
    d += __builtin_convertvector(lanes::load(w + 12), D4);
  }
  const D4 lanes_sum = (a + b) + (c + d);
  double sum = (lanes_sum[0] + lanes_sum[1]) + (lanes_sum[2] + lanes_sum[3]);
  for (; w != end; ++w) sum += static_cast<double>(*w);
  return sum;
}

double log_sum_exp(std::span<const float> logits) {
  const int32_t top = argmax(logits);
  if (top < 0) {
    throw_error(ErrorCode::kBadInput,
                "logits: none of {} is a number above -infinity: the model's output is damaged",
                logits.size());
  }
  const float largest = logits[static_cast<size_t>(top)];
  if (std::isinf(largest)) return static_cast<double>(largest);
  std::array<float, 1024> weights;
  double sum = 0.0;
  for (size_t begin = 0; begin < logits.size(); begin += weights.size()) {
    const size_t n = std::min(weights.size(), logits.size() - begin);
    exp_shifted(logits.subspan(begin, n), largest, 1.0f, weights.data());
    sum += sum_in_order({weights.data(), n});
  }
  return static_cast<double>(largest) + std::log(sum);
}

double log_softmax_at(std::span<const float> logits, int32_t index, double log_sum) {
  const float value = logits[static_cast<size_t>(index)];
  if (std::isnan(value)) return -std::numeric_limits<double>::infinity();
  if (std::isinf(log_sum)) {
    // +infinite logits share the probability evenly.
    const auto ties = std::count(logits.begin(), logits.end(), std::numeric_limits<float>::infinity());
    return std::isinf(value) && value > 0 ? -std::log(static_cast<double>(ties))
                                          : -std::numeric_limits<double>::infinity();
  }
  return static_cast<double>(value) - log_sum;
}

}  // namespace millrace
