#include "engine/committer.h"

#include <algorithm>

#include "base/check.h"
#include "engine/fp8_names.h"

namespace millrace {

Committer::Committer(Runtime& runtime, SampleTable& samples, sched::Scheduler& scheduler,
                     const Picker& picker, Delivery& delivery, Recorder& recorder,
                     const EngineOptions& options)
    : runtime_(runtime),
      cache_(runtime.cache()),
      samples_(samples),
      scheduler_(scheduler),
      picker_(picker),
      delivery_(delivery),
      recorder_(recorder),
      options_(options) {}

// ---------------------------------------------------------------- one sample

void Committer::commit(const StepItem& item) {
  try {
    if (item.sample->failure) std::rethrow_exception(item.sample->failure);
    advance(item);
  } catch (...) {
    delivery_.fail(item.id, std::current_exception());
  }
}

void Committer::advance(const StepItem& item) {
  Sample& sample = *item.sample;
  take_scores(sample);
  const int32_t length = sample.blocks.length();
  const auto known = static_cast<int32_t>(sample.tokens.size());
  // Drafts that were right are the first of what was picked: they are computed already.
  const int32_t right = item.last && !sample.hidden ? static_cast<int32_t>(sample.picked.size()) - 1 : 0;
  const int32_t fed = std::min(length + item.tokens, known);
  if (item.last) {
    for (const SampledToken& picked : sample.picked) sample.tokens.push_back(picked.token);
  }
  advance_named(cache_, sample.blocks,
                std::span(sample.tokens)
                    .subspan(static_cast<size_t>(length), static_cast<size_t>(fed + right - length)),
                sample.job->fp8_until, names_);
  if (item.drafts > 0) record_drafts(item, right);
  if (item.last && sample.hidden) {
    deliver_embedding(item);
    return;
  }
  if (item.last) {
    for (size_t i = 0; i < sample.picked.size(); ++i) {
      if (delivery_.token(item.id, sample.picked[i], fed + static_cast<int32_t>(i))) return;
    }
  }
  scheduler_.update(item.id, sample.blocks.length(), static_cast<int32_t>(sample.tokens.size()));
}

// The logprobs and logits of a prompt that is computed, for the first event of every sample.
void Committer::take_scores(Sample& sample) {
  if (!sample.scores || !sample.scores->complete()) return;
  sample.job->prompt_logprobs = sample.scores->take_logprobs();
  sample.job->prompt_logits = sample.scores->take_logits();
  sample.scores.reset();
}

void Committer::record_drafts(const StepItem& item, int32_t right) {
  Sample& sample = *item.sample;
  sample.draft.lengths.of[sample.draft.evidence].add(item.drafts, right);
  sample.usage.drafted_tokens += item.drafts;
  sample.usage.accepted_tokens += right;
  Recorder::add(recorder_.drafted, static_cast<uint64_t>(item.drafts));
  Recorder::add(recorder_.accepted, static_cast<uint64_t>(right));
}

void Committer::deliver_embedding(const StepItem& item) {
  HiddenPool& pool = *item.sample->hidden;
  MILLRACE_CHECK(pool.complete());
  std::vector<float> embedding = pool.take();
  runtime_.check_logits(embedding);
  if (item.sample->job->request.embedding == Pooling::kScores) embedding = runtime_.scores_of(embedding);
  delivery_.embedding(item.id, std::move(embedding));
}

// ---------------------------------------------------------------- forks

void Committer::fork(const StepItem& item, std::span<const float> logits) {
  Sample& parent = *item.sample;
  Job& job = *parent.job;
  if (parent.failure) return;  // all of them end with it
  take_scores(parent);
  // The children stand where the parent stands once its prompt counts.
  advance_named(cache_, parent.blocks,
                std::span(parent.tokens).subspan(static_cast<size_t>(parent.blocks.length())), job.fp8_until,
                names_);
  job.forked = true;
  for (int32_t i = 1; i < job.request.samples; ++i) {
    sched::Id id = -1;
    try {
      std::unique_ptr<Sample> child = make_child(parent, i);
      const sched::Id next = samples_.next_id(job);
      scheduler_.reserve(next + 1);
      samples_.add(next, std::move(child));
      id = next;
      scheduler_.fork(item.id, id);
      StepItem first{.id = id,
                     .life = samples_.life(id),
                     .sample = &samples_[id],
                     .tokens = 0,
                     .drafts = 0,
                     .last = true,
                     .row = item.row};
      picker_.pick(first, {.sampled = {}, .left = {}, .logits = logits});
      commit(first);
    } catch (...) {
      if (id >= 0) {
        delivery_.fail(id, std::current_exception());
      } else {
        delivery_.fail_fork(job, i, std::current_exception());
        scheduler_.drop_sample(item.id);
      }
    }
  }
}

std::unique_ptr<Sample> Committer::make_child(const Sample& parent, int32_t index) {
  const Job& job = *parent.job;
  SamplingParams params = job.request.sampling;
  params.seed = sample_seed(job.events->seed, index);
  Sampler sampler(params, runtime_.config().vocab);
  const auto prompt_end = parent.tokens.begin() + parent.prompt_tokens();
  sampler.add_prompt(text_tokens(std::vector<int32_t>(parent.tokens.begin(), prompt_end)));
  auto child = std::make_unique<Sample>(parent.job, index, std::move(sampler));
  child->reserve(parent.tokens.capacity(), options_.speculation, options_.max_draft);
  child->tokens = parent.tokens;
  child->mask.resize(parent.mask.size());
  child->usage = parent.usage;
  child->served = true;
  child->blocks = cache_.fork(parent.blocks);
  return child;
}

}  // namespace millrace
