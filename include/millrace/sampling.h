// How the next token is chosen, in the order of OpenAI, vLLM and Hugging Face:
//   repetition, frequency, presence penalties -> logit bias -> constraint -> temperature -> top-k -> top-p ->
//   min-p -> draw
// Same seed and same logits give the same tokens on every machine.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>

namespace millrace {

// The defaults change nothing: the model's own distribution is sampled.
struct SamplingParams {
  float temperature = 1.0f;  // 0: greedy, ties to the lower id; else logits are divided by it. [0, 100]
  int32_t top_k = 0;         // keep the k most likely; 0: all
  float top_p = 1.0f;        // keep the fewest most likely whose probabilities reach this. (0, 1]
  float min_p = 0.0f;        // keep those at least this times as likely as the likeliest. [0, 1]
  float repetition_penalty =
      1.0f;  // of prompt and output tokens: positive logits / this, negative * this. (0, 100]
  float presence_penalty = 0.0f;             // subtracted once from tokens already generated. [-100, 100]
  float frequency_penalty = 0.0f;            // subtracted for every time a token was generated. [-100, 100]
  std::map<int32_t, float> logit_bias = {};  // added to these tokens' logits; finite
  std::optional<uint64_t> seed = {};         // absent: a fresh one from the system
  // Absent: no logprobs. n: the chosen token's and the n likeliest's, of the model's own distribution (before
  // penalties, bias and temperature). [0, 1000]
  std::optional<int32_t> logprobs = {};
};

// What may come next, decided by somebody else: a grammar, a schema, a list of choices. One object follows
// one sample; the engine calls it from its own threads, one call at a time.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  // A constraint in the same state, for another sample of the same prompt.
  virtual std::unique_ptr<TokenConstraint> clone() const = 0;
  // Sets bit t % 64 of mask[t / 64] for every token t that may come next; the mask comes zeroed. False: all
  // may, and the mask was not touched. At least one token must be allowed.
  virtual bool allowed(std::span<uint64_t> mask) = 0;
  virtual void accept(int32_t token) = 0;
};

}  // namespace millrace
