#include "engine/planner.h"

#include <algorithm>

#include "base/error.h"
#include "engine/fp8_names.h"
#include "engine/ranks_lost.h"

namespace millrace {

Planner::Planner(Runtime& runtime, SampleTable& samples, sched::Scheduler& scheduler, Delivery& delivery,
                 Recorder& recorder, const EngineOptions& options)
    : runtime_(runtime),
      cache_(runtime.cache()),
      samples_(samples),
      scheduler_(scheduler),
      delivery_(delivery),
      recorder_(recorder),
      options_(options),
      memory_(runtime, samples) {}

// ---------------------------------------------------------------- between plans

void Planner::admit(std::shared_ptr<Job> job) {
  Job& j = *job;
  j.open = j.request.samples;
  const auto since_start = [&](std::chrono::steady_clock::time_point t) {
    return std::chrono::duration<double>(t - recorder_.start).count();
  };
  try {
    auto sample = std::make_unique<Sample>(job, 0, std::move(*j.sampler));
    sample->tokens.assign(j.prompt->tokens.begin(), j.prompt->tokens.end());
    if (j.fp8_until > 0)
      std::transform(sample->tokens.begin(), sample->tokens.end(), sample->tokens.begin(), fp8_name);
    sample->prompt = j.prompt;
    const auto length = static_cast<int32_t>(sample->tokens.size());
    sample->usage.prompt_tokens = length;
    if (j.request.prompt_logprobs || j.request.prompt_logits) {
      sample->scores.emplace(
          sample->tokens,
          PromptScores::Wanted{.top = j.request.prompt_logprobs,
                               .logits = j.request.prompt_logits ? runtime_.config().vocab : 0});
    }
    j.arrival_s = since_start(j.arrival);
    const Id id = samples_.next_id(j);
    scheduler_.reserve(id + 1);
    samples_.add(id, std::move(sample));
    scheduler_.add(id, {.priority = j.request.priority,
                        .time = j.arrival_s,
                        .deadline = j.request.deadline ? since_start(*j.request.deadline) : sched::kNever,
                        .tokens = length,
                        .samples = j.request.samples});
  } catch (...) {
    samples_.forget_job(j);
    delivery_.fail_job(j, std::current_exception());
  }
}

void Planner::cancel(const Inbox::Cancel& cancel) {
  for (const Id id : samples_.ids_of(cancel.request)) {
    const Sample& sample = samples_[id];
    // Before the samples fork, the first stands for all of them.
    const bool one =
        sample.index == cancel.sample && (sample.job->request.samples == 1 || sample.job->forked);
    if (cancel.sample < 0 || one) scheduler_.cancel(id);
  }
}

void Planner::poll_loading() {
  for (size_t i = 0; i < samples_.loading().size();) {
    const Id id = samples_.loading()[i];
    Sample& sample = samples_[id];
    try {
      if (!cache_.ready(sample.blocks)) {
        ++i;
        continue;
      }
    } catch (...) {
      delivery_.fail(id, std::current_exception());  // which takes it out of loading()
      continue;
    }
    scheduler_.stands_at(id, sample.blocks.length(), false);
    if (!sample.served) sample.usage.cached_tokens = sample.blocks.cached_tokens();
    samples_.set_loaded(id);
  }
}

// ---------------------------------------------------------------- what a plan says

bool Planner::plan(const sched::Rates& rates, Buffer<StepItem>& items) {
  items.clear();
  const sched::Plan& plan = scheduler_.plan(recorder_.now(), memory_, rates);
  for (const Id id : plan.cancelled) delivery_.end(id, FinishReason::kCancelled);
  for (const Id id : plan.expired) delivery_.end(id, FinishReason::kDeadline);
  const auto guarded = [&](Id id, const auto& body) {
    try {
      body();
    } catch (const RanksLost&) {
      throw;
    } catch (...) {
      delivery_.fail(id, std::current_exception());
    }
  };
  for (const auto& preemption : plan.preempted) guarded(preemption.id, [&] { preempt(preemption); });
  // Those that run reserve before those that start (whose work comes last): what a start finds may differ
  // from what was promised.
  spare_logits_ = runtime_.spec().max_logit_rows;
  spare_rows_ = runtime_.spec().max_tokens;
  for (const sched::Work& w : plan.work) {
    spare_logits_ -= 1 + w.drafts;
    spare_rows_ -= w.tokens + w.drafts;
  }
  size_t work = 0;
  const size_t running = plan.work.size() - plan.started_work;
  for (; work < running; ++work) guarded(plan.work[work].id, [&] { collect(plan.work[work], items); });
  for (const auto& s : plan.started) guarded(s.id, [&] { start(s); });
  for (; work < plan.work.size(); ++work) {
    guarded(plan.work[work].id, [&] { collect(plan.work[work], items); });
  }
  return !plan.cancelled.empty() || !plan.expired.empty() || !plan.preempted.empty() || !plan.started.empty();
}

void Planner::plan_ends() {
  const sched::Plan& plan = scheduler_.plan_ends(recorder_.now());
  for (const Id id : plan.cancelled) delivery_.end(id, FinishReason::kCancelled);
  for (const Id id : plan.expired) delivery_.end(id, FinishReason::kDeadline);
}

// A plan may have been carried out in part when the device was lost: what a sample holds decides, and the
// scheduler is told.
void Planner::forget_computed() {
  for (Id id = 0; id < samples_.end(); ++id) {
    if (!samples_.holds(id)) continue;
    Sample& sample = samples_[id];
    samples_.set_loaded(id);
    const bool swapped = sample.blocks && sample.blocks.state() == kv::Sequence::State::kSwapped;
    if (swapped && scheduler_.is_swapped(id)) continue;
    sample.draft.blocks.reset();
    scheduler_.start_over(id);
    if (!sample.blocks && sample.prompt) continue;  // it has not started yet
    ++sample.usage.preemptions;
    Recorder::add(recorder_.preemptions_recompute, 1);
    start_over(sample);
  }
}

// Its blocks are given up; when it starts again, what is still remembered of them is found by name.
void Planner::start_over(Sample& sample) {
  const Job& job = *sample.job;
  std::vector<int32_t> names;
  if (job.fp8_until > 0) name_tokens(sample.tokens, 0, job.fp8_until, names);
  sample.prompt = cache_.make_prompt(job.fp8_until > 0 ? std::span<const int32_t>(names) : sample.tokens,
                                     job.request.cache_salt, job.block_variant);
  sample.blocks.reset();
}

void Planner::start_all_over() {
  for (Id id = 0; id < samples_.end(); ++id) {
    if (samples_.holds(id) && samples_[id].blocks) start_over(samples_[id]);
  }
  const auto& groups = runtime_.spec().kv_groups;
  for (size_t g = 0; g < groups.size(); ++g) cache_.evict(static_cast<int>(g), groups[g].num_blocks);
  for (const Id id : scheduler_.running_ids()) {
    Sample& sample = samples_[id];
    make_blocks(sample);
    sample.failure = nullptr;
    scheduler_.stands_at(id, sample.blocks.length(), false);
  }
}

void Planner::preempt(const sched::Plan::Preemption& preemption) {
  Sample& sample = samples_[preemption.id];
  ++sample.usage.preemptions;
  sample.draft.blocks.reset();
  samples_.set_loaded(preemption.id);
  if (preemption.swap) {
    if (cache_.swap_out(sample.blocks)) {
      Recorder::add(recorder_.preemptions_swap, 1);
      return;
    }
    scheduler_.not_swapped(preemption.id);
  }
  Recorder::add(recorder_.preemptions_recompute, 1);
  start_over(sample);
}

void Planner::start(const sched::Plan::Start& start) {
  Sample& sample = samples_[start.id];
  if (start.swapped && !cache_.swap_in(sample.blocks)) start_over(sample);
  if (!sample.blocks) make_blocks(sample);
  const bool loading = sample.blocks.state() == kv::Sequence::State::kLoading;
  scheduler_.stands_at(start.id, sample.blocks.length(), loading);
  if (loading) samples_.set_loading(start.id);
}

void Planner::make_blocks(Sample& sample) {
  const Request& request = sample.job->request;
  reserve_buffers(sample);
  sample.blocks = sample.needs_every_row()
                      ? cache_.make_sequence(request.cache_salt, sample.job->block_variant)
                      : cache_.attach(std::move(sample.prompt));
  sample.prompt.reset();
  if (!sample.served) sample.usage.cached_tokens = sample.blocks.cached_tokens();
}

// All that this sample will ever hold, so that no later step allocates.
void Planner::reserve_buffers(Sample& sample) const {
  const Request& request = sample.job->request;
  const int64_t longest = static_cast<int64_t>(runtime_.context()) + 1;
  const int64_t asked = static_cast<int64_t>(sample.prompt_tokens()) + request.max_tokens;
  const auto capacity = static_cast<size_t>(request.max_tokens > 0 ? std::min(longest, asked) : longest);
  sample.reserve(capacity, options_.speculation, options_.max_draft);
  if (sample.constraint) sample.mask.resize((static_cast<size_t>(runtime_.config().vocab) + 63) / 64);
  if (request.embedding && !sample.hidden) {
    const bool scores = *request.embedding == Pooling::kScores;
    sample.hidden.emplace(scores ? runtime_.pooling() : *request.embedding, sample.prompt_tokens(),
                          runtime_.config().hidden);
  }
}

// The tokens of an image are computed in one step: they see one another. So many as end with a whole one, or
// before it, or, where it comes first, more than were planned.
int32_t Planner::whole_images(const Sample& sample, int32_t tokens) {
  if (!runtime_.images_see_both_ways()) return tokens;
  const int32_t begin = sample.blocks.length();
  for (const ImagePlace& image : sample.job->images) {
    const int32_t end = image.first + image.tokens;
    if (begin + tokens <= image.first || begin + tokens >= end || begin >= end) continue;
    if (begin < image.first) return image.first - begin;
    const int32_t more = end - begin - tokens;
    if (more > spare_rows_) return 0;
    spare_rows_ -= more;
    return end - begin;
  }
  return tokens;
}

// Turns planned work into an item of the step, with its blocks reserved.
void Planner::collect(const sched::Work& work, Buffer<StepItem>& items) {
  if (!samples_.holds(work.id)) return;
  Sample& sample = samples_[work.id];
  if (sample.blocks.state() != kv::Sequence::State::kActive) return;
  const int32_t missing = static_cast<int32_t>(sample.tokens.size()) - sample.blocks.length();
  int32_t tokens = whole_images(sample, std::min(work.tokens, missing));
  if (tokens == 0) return;  // an image waits for a step with room for all of it
  if (sample.scores) {      // all of its rows want logits, and there is memory for so many
    tokens = std::min(tokens, 1 + std::max(0, spare_logits_));
    spare_logits_ -= tokens - 1;
  }
  const bool last = tokens == missing;
  int32_t drafts = last && tokens == 1 && !sample.scores
                       ? std::min(work.drafts, static_cast<int32_t>(sample.draft.tokens.size()))
                       : 0;
  if (!cache_.reserve(sample.blocks, tokens + drafts)) {
    drafts = 0;
    if (!cache_.reserve(sample.blocks, tokens)) return;  // the next plan knows better
  }
  items.push_back({.id = work.id,
                   .life = samples_.life(work.id),
                   .sample = &sample,
                   .tokens = tokens,
                   .drafts = drafts,
                   .last = last});
}

// ---------------------------------------------------------------- when nothing helps

bool Planner::fail_stuck() {
  const Id stuck = scheduler_.running() > 0 ? scheduler_.running_ids().front() : scheduler_.first_waiting();
  if (stuck < 0) return false;
  const Sample& sample = samples_[stuck];
  std::exception_ptr error = sample.failure;
  if (!error) {
    error = std::make_exception_ptr(
        Error(ErrorCode::kNoMemory, fmt::format("kv cache: {} tokens do not fit the pool, expected a smaller "
                                                "request or a larger pool",
                                                sample.tokens.size())));
  }
  delivery_.fail(stuck, error);
  return true;
}

void Planner::fail_lowest(const std::exception_ptr& error) noexcept {
  const Id id = scheduler_.running() > 0 ? scheduler_.running_ids().back() : scheduler_.first_waiting();
  if (id >= 0) delivery_.fail(id, error);
}

}  // namespace millrace
