// A request as a client writes it, and the events that answer it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "millrace/error.h"
#include "millrace/sampling.h"

namespace millrace {

struct ChatMessage {
  std::string role = {};  // "system", "user", "assistant", ...
  std::string content = {};
};

// How the hidden states of a prompt's tokens, behind the model's last norm, become one vector.
enum class Pooling {
  kMean,   // of all tokens: every one is computed, nothing is taken from the prefix cache
  kLast,   // the last token's, which has seen all others
  kFirst,  // the first token's: [CLS], which in an encoder has seen all others
  kNone,   // not at all: every token's, in order
  // As the model's classification head reads them: the head's scores, [ModelInfo::labels], stand in place of
  // an embedding.
  kScores,
};

// What Engine::submit throws for a prompt with more tokens than the context: kBadInput, told apart.
class PromptTooLong : public Error {
 public:
  explicit PromptTooLong(const std::string& message) : Error(ErrorCode::kBadInput, message) {}
};

struct Request {
  // The prompt: exactly one of these three.
  std::vector<int32_t> tokens = {};
  std::string text = {};  // as it stands, with the tokens the model's tokenizer adds in front
  std::vector<ChatMessage> messages = {};  // through the model's chat template

  // Of tokens that are two texts, as Engine::tokenize_pair gives them: where the second begins; 0: one text.
  int32_t second_text = 0;

  // PNG or JPEG files, in the order of their places in the prompt: where its tokens are
  // ModelInfo::Images::token. With tokens or text only.
  std::vector<std::shared_ptr<const std::string>> images = {};

  std::string adapter = {};  // the name of one of EngineOptions::adapters; empty: the model as it is

  // "full" or "sparse", of an engine whose EngineOptions::attention is sparse or request, and of sparse the
  // tokens that are read; empty and 0: the engine's.
  std::string attention = {};
  int32_t attention_budget = 0;

  // An embedding of the prompt instead of an answer: one kFinished event brings it. Sampling and max_tokens
  // mean nothing then; samples, stop and constraint are refused.
  std::optional<Pooling> embedding = {};

  // Absent: none. n: how likely each token of the prompt was after those before it, with the n likeliest
  // there; the first event of every sample brings them. Every token is computed then, whatever the cache has.
  // [0, 1000]
  std::optional<int32_t> prompt_logprobs = {};
  // The logits of every token of the prompt, what the model expects behind it; the first event of every
  // sample brings them. Every token is computed then, whatever the cache has.
  bool prompt_logits = false;

  SamplingParams sampling = {};
  std::shared_ptr<const TokenConstraint> constraint = {};  // cloned for every sample
  int32_t samples = 1;  // answers to the same prompt, which is computed once. Sample i > 0 has its own seed
  int32_t max_tokens = 0;                 // per sample; 0: until the context is full
  std::vector<std::string> stop = {};     // text before which to stop; it does not appear in the answer
  std::vector<int32_t> stop_tokens = {};  // beside the model's own end tokens
  bool ignore_end = false;                // end tokens are tokens like any other (stop_tokens still stop)
  bool show_special = false;              // special tokens appear in the text by name

  // Higher goes first. A request gains EngineOptions::ageing levels for each second it waits.
  int32_t priority = 0;
  std::optional<std::chrono::steady_clock::time_point> deadline = {};  // then it ends, wherever it is
  // Prefixes are shared only among requests with the same salt: tenants cannot probe each other's prompts.
  std::string cache_salt = {};
};

enum class FinishReason {
  kEndToken,    // the model ended its turn, or one of stop_tokens came
  kStopString,  // one of stop appeared; it and what follows are not in the text
  kMaxTokens,   // as many as were asked for
  kContext,     // the context is full
  kCancelled,
  kDeadline,
  kEmbedded,  // Event::embedding has it
  kError,     // Event::error says which
};
std::string_view to_string(FinishReason reason);  // "stop", "stop_string", "length", "context", ...

struct Usage {
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;  // of the prompt: found in the cache, not computed
  int32_t generated_tokens = 0;
  int32_t drafted_tokens = 0, accepted_tokens = 0;  // speculative decoding
  int32_t preemptions = 0;
  double queue_s = 0.0;        // from submit to the first step that served it
  double first_token_s = 0.0;  // from submit to the first token
  double total_s = 0.0;        // from submit to the end
};

struct TokenLogprob {
  int32_t token = -1;
  double logprob = 0.0;                              // of the first token of a prompt: 0, nothing is known
  std::vector<std::pair<int32_t, double>> top = {};  // likeliest first
};

struct Event {
  enum class Kind {
    kToken,     // token, text, logprobs; the first of a sample has its usage so far
    kFinished,  // the last event of this sample: finish, usage, text that was held back
    kFailed,    // as kFinished, with code and error
  };
  Kind kind = Kind::kToken;
  int32_t sample = 0;
  int32_t token = -1;
  // Became certain with this token: valid UTF-8, possibly empty.
  std::string text = {};
  double logprob = 0.0;  // 0 unless asked for
  std::vector<std::pair<int32_t, double>> top = {};
  // [prompt tokens], of the first token of a sample whose request has prompt_logprobs; else null.
  std::shared_ptr<const std::vector<TokenLogprob>> prompt = {};
  // [prompt tokens, vocabulary], of the same event where the request has prompt_logits; else null.
  std::shared_ptr<const std::vector<float>> prompt_logits = {};

  FinishReason finish = FinishReason::kMaxTokens;
  std::vector<float> embedding = {};  // [ModelInfo::embedding_size], with Pooling::kNone [prompt tokens,
                                      // that], of kEmbedded; not normalised
  Usage usage = {};
  ErrorCode code = ErrorCode::kInternal;
  std::string error = {};
};

}  // namespace millrace
