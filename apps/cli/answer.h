// One answer from the engine, streamed to whoever asked: what `run` and `chat` are made of.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "millrace/engine.h"

namespace millrace::cli {

struct AnswerResult {
  std::vector<Event> tokens;  // kToken events; an end token is the last
  FinishReason finish = FinishReason::kMaxTokens;
  uint64_t seed = 0;
  Usage usage;
  int32_t computed_tokens() const { return usage.prompt_tokens - usage.cached_tokens; }
  double prefill_tok_s() const;
  double decode_tok_s() const;
};

// "12 of 20 drafts right; ", or nothing where nothing is guessed.
std::string drafts_text(const EngineOptions& options, const Usage& usage);

// Submits the request and hands on each token with the text that became certain with it; the last call has
// token -1 and what was held back. A progress bar shows while a long prompt is read; Ctrl-C cancels the
// request (the result says so). Throws Error when the request fails.
AnswerResult stream_answer(Engine& engine, const Request& request,
                           const std::function<void(int32_t token, std::string_view text)>& on_text);

}  // namespace millrace::cli
