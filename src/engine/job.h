// A request inside the engine: a Job, and a Sample for each answer it wants. The engine's thread owns both
// from the moment they leave the inbox.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/buffer_pool.h"
#include "engine/drafter.h"
#include "engine/stop_matcher.h"
#include "engine/stream.h"
#include "kv/cache.h"
#include "sample/sampler.h"
#include "tokenizer/tokenizer.h"

namespace millrace {

struct Job {
  std::shared_ptr<Stream::State> stream;
  Request request;                             // without its prompt
  std::shared_ptr<const kv::Prompt> prompt;    // tokens and the names of their blocks
  std::shared_ptr<const Tokenizer> tokenizer;  // null: no text
  std::vector<int32_t> end_tokens;             // that end this request
  std::optional<Sampler> sampler;              // of sample 0
  std::chrono::steady_clock::time_point arrival;
  double arrival_s = 0;  // the same on the engine's clock
  int32_t open = 0;      // samples that have not ended
  bool forked = false;   // its samples are there
};

// A job with its stream. Throws Error{kBadInput} for a request that cannot be served as it is written. Any
// thread.
std::shared_ptr<Job> make_job(const Runtime& runtime, const kv::Cache& cache,
                              const ChatTemplate* chat_template, const Request& request, int32_t max_running,
                              uint64_t id, std::shared_ptr<Inbox> inbox);

// From sampled tokens to text that may be shown.
class TextStream {
 public:
  explicit TextStream(const Job& job) : stops_(job.request.stop) {
    if (job.tokenizer) detokenizer_.emplace(job.tokenizer, job.request.show_special);
  }
  std::string push(int32_t token) {
    return detokenizer_ ? stops_.push(detokenizer_->push(token)) : std::string();
  }
  std::string finish() {
    if (!detokenizer_ || stops_.stopped()) return {};
    std::string out = stops_.push(detokenizer_->finish());
    if (!stops_.stopped()) out += stops_.finish();
    return out;
  }
  bool stopped() const { return stops_.stopped(); }

 private:
  std::optional<StreamingDetokenizer> detokenizer_;
  StopMatcher stops_;
};

// Hidden states of a prompt's tokens on their way to one embedding. Summed in double in the order of their
// positions, so that it does not matter in which chunks they come.
struct HiddenPool {
  HiddenPool(Pooling kind, int32_t prompt_tokens, int32_t hidden);

  Buffer<double> sum;  // [hidden]
  Buffer<float> row;   // [hidden]
  int32_t next;        // position to be added; those before it are in, or not wanted
  int32_t count;       // positions that will be in
  std::vector<float> mean() const;
};

struct Sample {
  Sample(std::shared_ptr<Job> owner, int32_t which, Sampler own_sampler);

  const std::shared_ptr<Job> job;
  const int32_t index;
  Sampler sampler;
  TextStream text;
  std::unique_ptr<TokenConstraint> constraint;
  Buffer<uint64_t> mask;  // of the constraint, [vocabulary / 64]

  Buffer<int32_t> tokens;  // prompt and answer: all that is known
  // What of them is to be found again when it starts (over); null once it runs.
  std::shared_ptr<const kv::Prompt> prompt;
  kv::Sequence blocks;
  std::optional<HiddenPool> hidden;  // for an embedding
  kv::Sequence draft_blocks;         // in the draft model's cache
  Buffer<int32_t> drafts;
  LookupDrafter lookup;
  DraftLengths draft_lengths;
  size_t evidence = 0;  // of these drafts

  Usage usage;
  bool served = false;          // has been part of a step
  double last_token_s = 0;      // on the engine's clock
  Buffer<SampledToken> picked;  // by this step
  std::exception_ptr failure;   // of this step

  // Every token has to be computed: what the cache remembers of it has no hidden states.
  bool needs_every_row() const { return job->request.embedding == Pooling::kMean; }
  int32_t prompt_tokens() const { return static_cast<int32_t>(job->prompt->tokens.size()); }
  int32_t generated() const { return static_cast<int32_t>(tokens.size()) - prompt_tokens(); }
};

}  // namespace millrace
