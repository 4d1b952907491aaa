// Sampler: from logits to the next token, with the state one request needs (what it has seen, its random
// stream). The order of operations is that of OpenAI, vLLM and Hugging Face:
//   repetition, frequency, presence penalties -> logit bias -> temperature -> top-k -> top-p -> min-p -> draw
// Same seed and same logits give the same tokens on every machine: the generator is counter-based and the
// arithmetic is our own (sample/softmax.h).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace millrace {

// The defaults change nothing: the model's own distribution is sampled.
struct SamplingParams {
  float temperature = 1.0f;  // 0: greedy, ties to the lower id; else logits are divided by it. [0, 100]
  int32_t top_k = 0;         // keep the k most likely; 0: all
  float top_p = 1.0f;        // keep the fewest most likely whose probabilities reach this. (0, 1]
  float min_p = 0.0f;        // keep those at least this times as likely as the likeliest. [0, 1]
  float repetition_penalty =
      1.0f;  // of prompt and output tokens: positive logits / this, negative * this. (0, 100]
  float presence_penalty = 0.0f;        // subtracted once from tokens already generated. [-100, 100]
  float frequency_penalty = 0.0f;       // subtracted for every time a token was generated. [-100, 100]
  std::map<int32_t, float> logit_bias;  // added to these tokens' logits; finite
  std::optional<uint64_t> seed;         // absent: a fresh one from the system
  // Absent: no logprobs. n: the chosen token's and the n likeliest's, of the model's own distribution (before
  // penalties, bias and temperature). [0, 1000]
  std::optional<int32_t> logprobs;
};

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
  // above -infinity throw Error{kBadInput}.
  SampledToken sample(std::span<const float> logits);

 private:
  std::span<const float> adjusted(std::span<const float> logits);
  int32_t draw(std::span<const float> logits);
  void compact();
  size_t pick(double uniform);
  void count(int32_t token, int32_t times_generated);
  double next_uniform();

  SamplingParams params_;
  int32_t vocab_;
  uint64_t seed_;
  uint64_t draws_ = 0;              // the random stream's counter
  std::vector<int32_t> generated_;  // [vocab] times generated; -1: never seen (0: in the prompt only)
  std::vector<int32_t> seen_;       // tokens whose generated_ is not -1
  std::vector<float> logits_;       // [vocab] after penalties and bias
  std::vector<int32_t> ids_;        // of weights_ once top-k has cut it; empty: a weight's index is its token
  std::vector<double> block_sums_;  // of weights_
  std::vector<float> weights_;  // [vocab] unnormalized probabilities, the likeliest 1; cut to 0 when dropped
};

}  // namespace millrace
