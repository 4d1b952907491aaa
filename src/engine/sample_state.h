// Sample: one of the answers that a request wants, while it is made. The engine's thread owns it. What each
// part of a round may change:
//   planner    the buffers, prompt, blocks: when it starts or gives way
//   drafting   draft
//   picker     sampler, constraint, mask, hidden, scores, picked, failure: of one step
//   committer  tokens, blocks: what the step computed counts
//   delivery   text, usage, times: what the client has been told
//   recovery   losses: how often ranks that computed it were lost (rank_recovery.h)
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>

#include "base/buffer_pool.h"
#include "engine/answer_text.h"
#include "engine/drafter.h"
#include "engine/hidden_pool.h"
#include "engine/job.h"
#include "engine/prompt_scores.h"
#include "kv/cache.h"
#include "sample/sampler.h"

namespace millrace {

struct Sample {
  Sample(std::shared_ptr<Job> owner, int32_t which, Sampler own_sampler);

  // The buffers of a sample that will hold `capacity` tokens at most and be offered `max_draft` drafts: no
  // later step allocates.
  void reserve(size_t capacity, Speculation speculation, int32_t max_draft);

  const std::shared_ptr<Job> job;
  const int32_t index;
  Sampler sampler;
  AnswerText text;
  std::unique_ptr<TokenConstraint> constraint;
  Buffer<uint64_t> mask;  // of the constraint, [vocabulary / 64]

  Buffer<int32_t> tokens;  // prompt and answer: all that is known
  // What of them is to be found again when it starts (over); null once it runs.
  std::shared_ptr<const kv::Prompt> prompt;
  kv::Sequence blocks;
  std::optional<HiddenPool> hidden;    // for an embedding
  std::optional<PromptScores> scores;  // while logprobs of the prompt are missing

  struct Draft {
    kv::Sequence blocks;  // in the draft model's cache
    Buffer<int32_t> tokens;
    LookupDrafter lookup;
    DraftLengths lengths;
    size_t evidence = 0;  // of these tokens
  } draft;

  Buffer<SampledToken> picked;  // by this step
  std::exception_ptr failure;   // of this step

  Usage usage;
  bool served = false;      // has been part of a step
  double last_token_s = 0;  // on the engine's clock
  int32_t losses = 0;       // of ranks that computed it, one after the other without a token in between
  int32_t lost_at = 0;      // generated() then

  // Every token has to be computed: what the cache remembers of it has no hidden states and no logits.
  bool needs_every_row() const {
    return job->request.embedding.value_or(Pooling::kLast) != Pooling::kLast || scores;
  }
  int32_t prompt_tokens() const { return static_cast<int32_t>(job->prompt->tokens.size()); }
  int32_t generated() const { return static_cast<int32_t>(tokens.size()) - prompt_tokens(); }
};

}  // namespace millrace
