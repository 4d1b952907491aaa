// generate(): the loop of one sequence: feed the prompt, sample, stream text, stop. What `run` and `chat` are
// made of, and the plainest example of how a Runtime is driven.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/runtime.h"
#include "millrace/request.h"
#include "sample/sampler.h"

namespace millrace {

struct GenerateOptions {
  SamplingParams sampling;
  int32_t max_tokens = 0;  // 0: until the context is full
  std::vector<std::string> stop;
  bool show_special = false;                  // special tokens appear in the text by name
  bool ignore_end = false;                    // end tokens are tokens like any other
  const std::atomic<bool>* cancel = nullptr;  // looked at between steps
  // Once per sampled token (the end token too), with the text that became certain: valid UTF-8, possibly
  // empty.
  std::function<void(const SampledToken& token, std::string_view text)> on_token;
  // Prompt tokens fed so far, and all of them.
  std::function<void(size_t done, size_t total)> on_prefill;
};

struct GenerateResult {
  std::vector<SampledToken> tokens;  // all sampled; an end token is the last
  std::string text;                  // all text given to on_token
  FinishReason finish = FinishReason::kMaxTokens;
  uint64_t seed = 0;
  int32_t prompt_tokens = 0;  // fed now, without those cached before
  int32_t cached_tokens = 0;
  double prefill_s = 0.0;      // until the prompt's logits were there
  double first_token_s = 0.0;  // from the call to the first token sampled
  double decode_s = 0.0;       // of the steps after the prompt: decode_steps of them
  int32_t decode_steps = 0;
  double prefill_tok_s() const { return prefill_s > 0 ? prompt_tokens / prefill_s : 0.0; }
  double decode_tok_s() const { return decode_s > 0 ? decode_steps / decode_s : 0.0; }
};

// Continues `sequence`, whose first sequence.length() tokens are those of `prompt`; at least one more must
// follow. Afterwards the sequence holds the prompt and every sampled token but possibly the last. Throws
// Error{kBadInput} for an empty prompt, one that does not fit the context, and bad sampling parameters.
GenerateResult generate(Runtime& runtime, Sequence& sequence, std::span<const int32_t> prompt,
                        const GenerateOptions& options);

}  // namespace millrace
