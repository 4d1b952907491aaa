// The arithmetic of drawing a token, in one place for the host's sampler and for devices: the same logits and
// the same random number give the same token on all of them, however they cut the work up. An exponential of
// our own in float32 without fused multiply-adds gives the same weights; and weights are added as whole
// numbers, units of 2^-40 of the likeliest's, so that the order of adding cannot matter. What is less than
// half a unit (one part in 10^12 of the likeliest) is never drawn.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define MILLRACE_HOST_DEVICE __host__ __device__
#else
#define MILLRACE_HOST_DEVICE
#endif

namespace millrace {

// A token that was seen, and how often it was generated; 0: in the prompt only.
struct TokenCount {
  int32_t token, times;
};
struct TokenBias {
  int32_t token;
  float bias;
};

namespace sampling {

// e^x = 2^n e^r, n = round(x / ln 2), |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to an integer in the low
// bits.
inline constexpr float kLog2E = 1.44269504f, kRound = 12582912.0f;
inline constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;  // ln 2 split: n * high is exact
inline constexpr float kLowestExponent = -87.0f;                           // below, e^x counts as 0
// Taylor to degree 6: the remainder is below 2e-7 of the value for |r| <= 0.347.

// e^x for x <= 0; 0 below -87 and for NaN. (sample/token_softmax.cpp has the same for four at a time.)
MILLRACE_HOST_DEVICE inline float exp_nonpositive(float x) {
  if (!(x >= kLowestExponent)) return 0.0f;
  const float shifted = x * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float p = 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // The low bits of `shifted` hold n: moved up to the exponent they multiply by 2^n. n >= -126 here.
  return std::bit_cast<float>(std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(shifted) << 23));
}

// The weight of a logit beside the maximum; infinite ones share everything.
MILLRACE_HOST_DEVICE inline float weight_of(float logit, float max_logit, float scale) {
  if (max_logit == INFINITY) return logit == max_logit ? 1.0f : 0.0f;
  return exp_nonpositive((logit - max_logit) * scale);
}

inline constexpr double kUnits = 0x1p40;  // of a weight of 1

// A weight in [0, 1] as units, rounded to the nearest, halves to even.
MILLRACE_HOST_DEVICE inline uint64_t units_of(float weight) {
#ifdef __CUDA_ARCH__
  return __float2ull_rn(weight * 0x1p40f);
#else
  constexpr double kRoundDouble = 0x1p52;  // adding it leaves no bits behind the point
  return static_cast<uint64_t>((static_cast<double>(weight) * kUnits + kRoundDouble) - kRoundDouble);
#endif
}

// How many units lie before the one drawn, for a random number in [0, 1).
MILLRACE_HOST_DEVICE inline uint64_t drawn_unit(double uniform, uint64_t total) {
  const auto at = static_cast<uint64_t>(uniform * static_cast<double>(total));
  return at < total ? at : total - 1;  // where rounding went past the last
}

// How many of the total's units the likeliest tokens of top-p hold at least.
MILLRACE_HOST_DEVICE inline uint64_t units_of_mass(float top_p, uint64_t total) {
  const auto mass = static_cast<uint64_t>(ceil(static_cast<double>(top_p) * static_cast<double>(total)));
  return mass < 1 ? 1 : mass < total ? mass : total;
}

// Penalties of a token that was seen (millrace/sampling.h).
MILLRACE_HOST_DEVICE inline float penalized(float logit, int32_t times, float repetition, float presence,
                                            float frequency) {
  logit = logit > 0.0f ? logit / repetition : logit * repetition;
  if (times > 0) {
    logit -= frequency * static_cast<float>(times);
    logit -= presence;
  }
  return logit;
}

}  // namespace sampling
}  // namespace millrace
