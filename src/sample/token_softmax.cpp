#include "sample/token_softmax.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/sampling_math.h"
#include "sample/vec4.h"

namespace millrace {
namespace {

using vec4::D4;
using vec4::F4;
using vec4::I4;
using vec4::kWidth;

constexpr int32_t kLowestKey = std::numeric_limits<int32_t>::min();

// Orders like the float it came from, as a signed integer; NaN orders below everything, -0 with +0.
inline I4 ordered_key(F4 x) {
  const I4 bits = vec4::bits(x + 0.0f);
  const I4 key = bits ^ ((bits >> 31) & 0x7fffffff);
  return vec4::choose(I4(x == x), key, vec4::splat(kLowestKey));
}

// sampling::exp_nonpositive for four.
inline F4 exp_lanes(F4 x) {
  using namespace sampling;
  const I4 in_range = I4(x >= kLowestExponent);  // NaN is not
  const F4 clamped = vec4::choose(in_range, x, vec4::splat(kLowestExponent));
  const F4 shifted = clamped * kLog2E + kRound;
  const F4 n = shifted - kRound;
  const F4 r = (clamped - n * kLn2High) - n * kLn2Low;
  F4 p = vec4::splat(1.0f / 720.0f);
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const I4 value = vec4::bits(p) + (vec4::bits(shifted) << 23);
  return vec4::floats(value & in_range);
}

// out[i] = e^((logits[i] - largest) * scale)
void exp_shifted(std::span<const float> logits, float largest, float scale, float* out) {
  size_t i = 0;
  for (; i + 2 * kWidth <= logits.size(); i += 2 * kWidth) {
    const F4 a = vec4::load(logits.data() + i), b = vec4::load(logits.data() + i + kWidth);
    vec4::store(out + i, exp_lanes((a - largest) * scale));
    vec4::store(out + i + kWidth, exp_lanes((b - largest) * scale));
  }
  for (; i < logits.size(); ++i) out[i] = sampling::exp_nonpositive((logits[i] - largest) * scale);
}

}  // namespace

int32_t argmax(std::span<const float> logits) {
  const auto better = [](I4 a, I4 b) { return vec4::choose(I4(a > b), a, b); };
  I4 best = vec4::splat(kLowestKey), best_odd = best;
  size_t i = 0;
  for (; i + 2 * kWidth <= logits.size(); i += 2 * kWidth) {
    best = better(ordered_key(vec4::load(logits.data() + i)), best);
    best_odd = better(ordered_key(vec4::load(logits.data() + i + kWidth)), best_odd);
  }
  for (; i < logits.size(); ++i) best = better(ordered_key(vec4::splat(logits[i])), best);
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

uint64_t sum_units(std::span<const float> weights) {
  // Units of 4,096 weights are below 2^53: doubles add them exactly.
  constexpr size_t kExact = 4096;
  constexpr double kRoundDouble = 0x1p52;
  uint64_t sum = 0;
  for (size_t begin = 0; begin < weights.size(); begin += kExact) {
    const float* w = weights.data() + begin;
    const float* const end = weights.data() + std::min(weights.size(), begin + kExact);
    D4 a{}, b{};  // two chains: one alone would wait for each addition to finish
    for (; end - w >= 8; w += 8) {
      const D4 x = __builtin_convertvector(vec4::load(w), D4) * sampling::kUnits;
      const D4 y = __builtin_convertvector(vec4::load(w + 4), D4) * sampling::kUnits;
      a += (x + kRoundDouble) - kRoundDouble;
      b += (y + kRoundDouble) - kRoundDouble;
    }
    const D4 lanes_sum = a + b;
    sum += static_cast<uint64_t>((lanes_sum[0] + lanes_sum[1]) + (lanes_sum[2] + lanes_sum[3]));
    for (; w != end; ++w) sum += sampling::units_of(*w);
  }
  return sum;
}

void throw_no_logits(size_t count) {
  throw_error(ErrorCode::kBadInput,
              "logits: none of {} is a number above -infinity: the model's output is damaged", count);
}

double log_sum_exp(std::span<const float> logits) {
  const int32_t top = argmax(logits);
  if (top < 0) throw_no_logits(logits.size());
  const float largest = logits[static_cast<size_t>(top)];
  if (std::isinf(largest)) return static_cast<double>(largest);
  std::array<float, 1024> weights;
  uint64_t units = 0;
  for (size_t begin = 0; begin < logits.size(); begin += weights.size()) {
    const size_t n = std::min(weights.size(), logits.size() - begin);
    exp_shifted(logits.subspan(begin, n), largest, 1.0f, weights.data());
    units += sum_units({weights.data(), n});
  }
  return log_of_units(largest, units);
}

double log_of_units(float largest, uint64_t units) {
  return static_cast<double>(largest) + std::log(static_cast<double>(units) / sampling::kUnits);
}

double log_softmax_of(float logit, double log_sum, uint64_t units) {
  constexpr double kNever = -std::numeric_limits<double>::infinity();
  if (std::isnan(logit)) return kNever;
  if (!std::isinf(log_sum)) return static_cast<double>(logit) - log_sum;
  // +infinite logits share the probability evenly.
  return std::isinf(logit) && logit > 0 ? -std::log(static_cast<double>(units) / sampling::kUnits) : kNever;
}

double log_softmax_at(std::span<const float> logits, int32_t index, double log_sum) {
  uint64_t units = 0;
  if (std::isinf(log_sum)) {
    const auto ties = std::count(logits.begin(), logits.end(), std::numeric_limits<float>::infinity());
    units = static_cast<uint64_t>(ties) * sampling::units_of(1.0f);
  }
  return log_softmax_of(logits[static_cast<size_t>(index)], log_sum, units);
}

}  // namespace millrace
