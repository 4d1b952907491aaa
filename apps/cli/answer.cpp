#include "answer.h"

#include <fmt/core.h>

#include <chrono>
#include <utility>

#include "base/error.h"
#include "interrupt.h"
#include "progress.h"

namespace millrace::cli {

double AnswerResult::prefill_tok_s() const {
  const double seconds = usage.first_token_s - usage.queue_s;
  return seconds > 0 ? computed_tokens() / seconds : 0.0;
}

// Of the steps after the first token.
double AnswerResult::decode_tok_s() const {
  const double seconds = usage.total_s - usage.first_token_s;
  return usage.generated_tokens > 1 && seconds > 0 ? (usage.generated_tokens - 1) / seconds : 0.0;
}

std::string drafts_text(const EngineOptions& options, const Usage& usage) {
  if (options.speculation == Speculation::kOff) return "";
  return fmt::format("{} of {} drafts right; ", usage.accepted_tokens, usage.drafted_tokens);
}

AnswerResult stream_answer(Engine& engine, const Request& request,
                           const std::function<void(int32_t token, std::string_view text)>& on_text) {
  constexpr std::chrono::milliseconds kLookAround(50);  // at the interrupt flag, and at the prompt's progress
  const uint64_t before = engine.stats().computed_tokens;
  EventStream stream = engine.submit(request);
  Progress progress("prompt", false);
  AnswerResult result;
  result.seed = stream.seed();
  bool cancelled = false;
  while (!stream.done()) {
    if (interrupt_flag() && !std::exchange(cancelled, true)) stream.cancel();
    std::optional<Event> event = stream.next_for(kLookAround);
    if (!event) {
      const auto computed = static_cast<size_t>(engine.stats().computed_tokens - before);
      // An interrupt is a cancelled request here: the summary still comes.
      const bool reading = result.tokens.empty() && computed < request.tokens.size();
      if (reading && !interrupt_flag()) progress.update(computed, request.tokens.size());
      continue;
    }
    progress.clear();
    if (event->kind == Event::Kind::kFailed) throw Error(event->code, event->error);
    on_text(event->token, event->text);
    if (event->kind == Event::Kind::kToken) {
      result.tokens.push_back(std::move(*event));
    } else {
      result.finish = event->finish;
      result.usage = event->usage;
    }
  }
  return result;
}

}  // namespace millrace::cli
