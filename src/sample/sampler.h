// Sampler: from logits to the next token, with the state one request needs (what it has seen, its place in
// the random sequence). What SamplingParams mean: millrace/sampling.h. Same seed and same logits give the
// same tokens on every machine: the generator is counter-based and the arithmetic is our own
// (base/sampling_math.h). A device that picks tokens itself is told what the sampler knows (counted, bias,
// uniform) and the sampler which token it was (accept). Buffers of the vocabulary's size belong to the
// thread, not to the sampler: a thousand requests share them.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/sampling_math.h"
#include "millrace/sampling.h"

namespace millrace {

// Throws Error{kBadInput} naming the parameter, what was found and what is allowed.
void validate(const SamplingParams& params, int32_t vocab);

struct SampledToken {
  int32_t token = -1;
  double logprob = 0.0;                         // 0 unless params.logprobs
  std::vector<std::pair<int32_t, double>> top;  // likeliest first, ties to the lower id
};

class Sampler {
 public:
  // Validates params.
  Sampler(const SamplingParams& params, int32_t vocab);

  uint64_t seed() const { return seed_; }
  const SamplingParams& params() const { return params_; }

  // Tokens of the prompt: they count for the repetition penalty only.
  void add_prompt(std::span<const int32_t> tokens);

  // Picks a token and counts it as generated. logits is [vocab]. NaN is never picked; logits without a number
  // above -infinity throw Error{kBadInput}. `allowed`, unless empty, has a bit for every token that may be
  // picked.
  SampledToken sample(std::span<const float> logits, std::span<const uint64_t> allowed = {});

  // Below a temperature of 1e-6 the second likeliest would need a logit equal to six digits to ever be drawn:
  // greedy.
  bool draws() const { return params_.temperature >= 1e-6f && params_.top_k != 1; }
  float scale() const { return 1.0f / params_.temperature; }  // of logits, when it draws
  // The random number of the next draw, or of the one after `ahead` others.
  double uniform(int32_t ahead = 0) const;
  // What penalties apply to; nothing without penalties.
  std::span<const TokenCount> counted() const { return counted_; }
  std::span<const TokenBias> bias() const { return bias_; }
  // Counts a token that was picked elsewhere, by the same rules.
  void accept(int32_t token);

  bool has_penalties() const;

 private:
  std::span<const float> adjusted(std::span<const float> logits, std::span<const uint64_t> allowed);
  int32_t draw(std::span<const float> logits);
  void count(int32_t token, int32_t times_generated);

  SamplingParams params_;
  int32_t vocab_;
  uint64_t seed_;
  uint64_t draws_ = 0;  // the random sequence's counter
  std::vector<TokenBias> bias_;
  // With penalties only:
  std::vector<int32_t> place_;  // [vocab] in counted_; -1: never seen
  std::vector<TokenCount> counted_;
};

// The seed of sample `index` of a request: its own for the first, another for each of the rest.
uint64_t sample_seed(uint64_t seed, int32_t index);

}  // namespace millrace
