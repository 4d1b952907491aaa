#include "engine/generate.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "base/check.h"
#include "base/error.h"
#include "engine/stop_matcher.h"

namespace millrace {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool cancelled(const GenerateOptions& options) {
  return options.cancel != nullptr && options.cancel->load(std::memory_order_relaxed);
}

// Feeds the tokens in steps; logits of the last, empty when cancelled on the way.
std::span<const float> feed(Runtime& runtime, Sequence& sequence, std::span<const int32_t> tokens,
                            const GenerateOptions& options) {
  const size_t chunk = static_cast<size_t>(runtime.spec().max_tokens);
  std::span<const float> logits;
  for (size_t done = 0; done < tokens.size();) {
    if (cancelled(options)) return {};
    const size_t n = std::min(chunk, tokens.size() - done);
    const bool last = done + n == tokens.size();
    const StepInput input{&sequence, tokens.subspan(done, n),
                          last ? StepInput::Want::kLast : StepInput::Want::kNone};
    logits = runtime.step({&input, 1});
    done += n;
    if (options.on_prefill) options.on_prefill(done, tokens.size());
  }
  return logits;
}

// From sampled tokens to text that may be shown.
class AnswerText {
 public:
  AnswerText(const Runtime& runtime, const GenerateOptions& options)
      : detokenizer_(runtime.shared_tokenizer(), options.show_special), stops_(options.stop) {}
  std::string push(int32_t token) { return stops_.push(detokenizer_.push(token)); }
  std::string finish() {
    if (stops_.stopped()) return {};
    std::string out = stops_.push(detokenizer_.finish());
    if (!stops_.stopped()) out += stops_.finish();
    return out;
  }
  bool stopped() const { return stops_.stopped(); }

 private:
  StreamingDetokenizer detokenizer_;
  StopMatcher stops_;
};

void check_prompt(const Runtime& runtime, const Sequence& sequence, std::span<const int32_t> prompt) {
  if (prompt.empty()) {
    throw_error(ErrorCode::kBadInput,
                "the prompt has no tokens, expected at least one (the model adds none itself)");
  }
  if (prompt.size() > static_cast<size_t>(runtime.context())) {
    throw_error(
        ErrorCode::kBadInput,
        "the prompt has {} tokens, expected at most the context of {} (--ctx; the model was trained for {})",
        prompt.size(), runtime.context(), runtime.config().context_length);
  }
  MILLRACE_CHECK(static_cast<size_t>(sequence.length()) < prompt.size());
}

bool is_end(const Runtime& runtime, const GenerateOptions& options, int32_t token) {
  const std::vector<int32_t>& ends = runtime.end_tokens();
  return !options.ignore_end && std::find(ends.begin(), ends.end(), token) != ends.end();
}

std::optional<FinishReason> limit_reached(const Runtime& runtime, const Sequence& sequence,
                                          const GenerateOptions& options, size_t sampled) {
  if (options.max_tokens > 0 && sampled >= static_cast<size_t>(options.max_tokens))
    return FinishReason::kMaxTokens;
  if (sequence.length() >= runtime.context()) return FinishReason::kContext;
  return std::nullopt;
}

}  // namespace

GenerateResult generate(Runtime& runtime, Sequence& sequence, std::span<const int32_t> prompt,
                        const GenerateOptions& options) {
  check_prompt(runtime, sequence, prompt);
  Sampler sampler(options.sampling, runtime.config().vocab);
  sampler.add_prompt(prompt);
  AnswerText text(runtime, options);
  GenerateResult result;
  result.seed = sampler.seed();
  result.cached_tokens = sequence.length();
  result.prompt_tokens = static_cast<int32_t>(prompt.size()) - result.cached_tokens;

  const Clock::time_point start = Clock::now();
  std::span<const float> logits =
      feed(runtime, sequence, prompt.subspan(static_cast<size_t>(result.cached_tokens)), options);
  result.prefill_s = seconds_since(start);

  while (true) {
    if (logits.empty() || cancelled(options)) {
      result.finish = FinishReason::kCancelled;
      break;
    }
    const SampledToken token = sampler.sample(logits);
    if (result.tokens.empty()) result.first_token_s = seconds_since(start);
    result.tokens.push_back(token);
    const bool end = is_end(runtime, options, token.token);
    std::string piece = end ? std::string() : text.push(token.token);
    const std::optional<FinishReason> finish =
        end              ? FinishReason::kEndToken
        : text.stopped() ? FinishReason::kStopString
                         : limit_reached(runtime, sequence, options, result.tokens.size());
    if (finish) piece += text.finish();
    result.text += piece;
    if (options.on_token) options.on_token(token, piece);
    if (finish) {
      result.finish = *finish;
      break;
    }
    const Clock::time_point step_start = Clock::now();
    const StepInput input{&sequence, {&token.token, 1}, StepInput::Want::kLast};
    logits = runtime.step({&input, 1});
    result.decode_s += seconds_since(step_start);
    ++result.decode_steps;
  }
  return result;
}

}  // namespace millrace
