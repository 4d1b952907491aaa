// Job: a request inside the engine, checked and tokenized; sample_state.h has the answers it wants. The
// engine's thread owns it from the moment it leaves the inbox.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/event_stream.h"
#include "engine/inbox.h"
#include "engine/runtime.h"
#include "kv/cache.h"
#include "sample/sampler.h"
#include "tokenizer/tokenizer.h"

namespace millrace {

struct Job {
  std::shared_ptr<EventStream::State> events;  // to the client
  Request request;                             // without its prompt
  int32_t adapter = -1;                        // by number; -1: none
  std::vector<ImagePlace> images;              // of the prompt, in order
  int32_t sparse_pages = 0;                    // SequenceSlice's
  int32_t fp8_until = 0;                       // Slice's: 0, or as long as the prompt
  std::string block_variant;                   // what its blocks are named for (Runtime::block_variant)
  // Tokens and the names of their blocks; before fp8_until the tokens are names too (fp8_names.h).
  std::shared_ptr<const kv::Prompt> prompt;
  std::shared_ptr<const Tokenizer> tokenizer;  // null: no text
  std::vector<int32_t> end_tokens;             // that end this request
  std::optional<Sampler> sampler;              // of sample 0
  std::chrono::steady_clock::time_point arrival;
  std::shared_ptr<const std::vector<TokenLogprob>> prompt_logprobs;  // once they are all there
  std::shared_ptr<const std::vector<float>> prompt_logits;           // the same
  double arrival_s = 0;                                              // the same on the engine's clock
  int32_t open = 0;                                                  // samples that have not ended
  bool forked = false;                                               // its samples are there
};

// Whose inbox a job with this prompt goes into.
using ChooseInbox = std::function<std::shared_ptr<Inbox>(const kv::Prompt& prompt)>;

// A job with its event stream. Throws Error{kBadInput} for a request that cannot be served as it is written.
// Any thread.
std::shared_ptr<Job> make_job(const Runtime& runtime, const kv::Cache& cache,
                              const ChatTemplate* chat_template, const Request& request, int32_t max_running,
                              uint64_t id, const ChooseInbox& choose);

}  // namespace millrace
