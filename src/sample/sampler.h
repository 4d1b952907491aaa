// Sampler: from logits to the next token, with the state one request needs (what it has seen, its random
// stream). What SamplingParams mean and their order: millrace/sampling.h. Same seed and same logits give the
// same tokens on every machine: the generator is counter-based and the arithmetic is our own
// (sample/softmax.h). Buffers of the vocabulary's size belong to the thread, not to the sampler: a thousand
// requests share them.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

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

 private:
  bool has_penalties() const;
  std::span<const float> adjusted(std::span<const float> logits, std::span<const uint64_t> allowed);
  int32_t draw(std::span<const float> logits);
  void count(int32_t token, int32_t times_generated);
  double next_uniform();

  SamplingParams params_;
  int32_t vocab_;
  uint64_t seed_;
  uint64_t draws_ = 0;  // the random stream's counter
  // With penalties only:
  std::vector<int32_t> generated_;  // [vocab] times generated; -1: never seen (0: in the prompt only)
  std::vector<int32_t> seen_;       // tokens whose generated_ is not -1
};

// The seed of sample `index` of a request: its own for the first, another for each of the rest.
uint64_t sample_seed(uint64_t seed, int32_t index);

}  // namespace millrace
