// For tests: random rows of logits with random parameters, as the sampler has them and as a device is told.
// With ties, infinities, NaN, masks that leave one token, cuts to one token and to hardly any mass.
#pragma once

#include <limits>
#include <random>
#include <vector>

#include "backend/backend.h"
#include "sample/sampler.h"

namespace millrace::test {

class SamplingCase {
 public:
  // seed decides everything; damaged: NaN and infinities among the logits of some.
  SamplingCase(uint32_t seed, int32_t vocab, bool damaged = true)
      : random_(seed), logits(random_logits(vocab, damaged)), sampler(random_params(vocab), vocab) {
    if (sampler.has_penalties()) add_history(vocab);
    if (chance(20)) allow(vocab);
    row.wanted = true;
    row.draw = sampler.draws();
    const SamplingParams& p = sampler.params();
    row.scale = sampler.scale();
    row.top_k = p.top_k;
    row.top_p = p.top_p;
    row.min_p = p.min_p;
    row.uniform = sampler.uniform();
    row.repetition_penalty = p.repetition_penalty;
    row.presence_penalty = p.presence_penalty;
    row.frequency_penalty = p.frequency_penalty;
    row.counted = sampler.counted();
    row.bias = sampler.bias();
    row.allowed = allowed;
    row.logprobs = p.logprobs.value_or(-1);
  }
  SamplingCase(const SamplingCase&) = delete;  // row points into it
  SamplingCase& operator=(const SamplingCase&) = delete;

 private:
  std::mt19937 random_;

 public:
  std::vector<float> logits;
  Sampler sampler;
  std::vector<uint64_t> allowed;
  SampleRow row;

 private:
  int32_t below(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint32_t>(n)); }
  bool chance(int32_t percent) { return below(100) < percent; }
  float between(float low, float high) {
    return low + (high - low) * static_cast<float>(random_() >> 8) * 0x1p-24f;
  }

  std::vector<float> random_logits(int32_t vocab, bool damaged) {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    std::vector<float> x(static_cast<size_t>(vocab));
    const float spread = chance(10) ? 0.0f : between(0.1f, 12.0f);
    const bool ties = chance(30);
    for (float& v : x) {
      v = (between(-1, 1) + between(-1, 1) + between(-1, 1)) * spread;
      if (ties) v = static_cast<float>(static_cast<int32_t>(2.0f * v)) * 0.5f;
    }
    const auto any = [&]() -> float& { return x[static_cast<size_t>(below(vocab))]; };
    if (!damaged) return x;
    if (chance(15)) {
      for (int i = 0; i < vocab / 2; ++i) any() = -kInf;
    }
    if (chance(3)) any() = std::numeric_limits<float>::quiet_NaN();
    if (chance(4)) any() = kInf;
    if (chance(2)) any() = kInf;
    if (chance(2)) x.assign(x.size(), -kInf);
    if (chance(3)) any() = 3e38f;
    return x;
  }

  SamplingParams random_params(int32_t vocab) {
    SamplingParams p;
    p.seed = random_();
    p.temperature = chance(20) ? 0.0f : chance(10) ? 1e-5f : between(0.05f, 3.0f);
    if (chance(40)) p.top_k = chance(20) ? 1 : chance(20) ? below(vocab) + 1 : below(60) + 1;
    if (chance(40)) p.top_p = chance(20) ? 1e-6f : chance(20) ? 0.9999999f : between(0.01f, 1.0f);
    if (chance(25)) p.min_p = chance(10) ? 1.0f : between(0.0f, 0.2f);
    if (chance(20)) p.repetition_penalty = between(0.5f, 2.0f);
    if (chance(20)) p.presence_penalty = between(-2.0f, 2.0f);
    if (chance(20)) p.frequency_penalty = between(-1.0f, 1.0f);
    if (chance(25)) {
      for (int i = below(30); i >= 0; --i) p.logit_bias[below(vocab)] = between(-20.0f, 20.0f);
    }
    if (chance(30)) p.logprobs = below(21);
    return p;
  }

  void add_history(int32_t vocab) {
    std::vector<int32_t> prompt;
    for (int i = below(40); i > 0; --i) prompt.push_back(below(vocab));
    sampler.add_prompt(prompt);
    for (int i = below(40); i > 0; --i) sampler.accept(below(std::min(vocab, 60)));
  }

  void allow(int32_t vocab) {
    allowed.assign((static_cast<size_t>(vocab) + 63) / 64, 0);
    const auto set = [&](int32_t t) { allowed[static_cast<size_t>(t) / 64] |= uint64_t{1} << (t % 64); };
    if (chance(40)) return set(below(vocab));
    for (int i = below(vocab); i >= 0; --i) set(below(vocab));
  }
};

}  // namespace millrace::test
