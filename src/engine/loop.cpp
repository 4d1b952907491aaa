// Requests come, start, give way and end; step.cpp has what happens in between.
#include "engine/loop.h"

#include <algorithm>
#include <new>

#include "base/check.h"
#include "base/error.h"

namespace millrace {

using sched::Counts;
using sched::kNever;

Sample::Sample(std::shared_ptr<Job> owner, int32_t which, Sampler own_sampler)
    : job(std::move(owner)), index(which), sampler(std::move(own_sampler)), text(*job) {
  if (job->request.constraint) constraint = job->request.constraint->clone();
}

Loop::Loop(Runtime& runtime, std::unique_ptr<ModelDrafter> drafter, const LoopOptions& options,
           std::shared_ptr<Inbox> inbox, Recorder& recorder)
    : runtime_(runtime),
      cache_(runtime.cache()),
      drafter_(std::move(drafter)),
      options_(options),
      inbox_(std::move(inbox)),
      recorder_(recorder),
      scheduler_(options.limits) {
  const auto most = static_cast<size_t>(options.limits.max_running);
  items_.reserve(most);
  slices_.reserve(most);
  loading_.reserve(most);
  fed_.reserve(2 * static_cast<size_t>(options.limits.draft_rows));
  draft_items_.reserve(most);
  if (runtime.executor().samples()) {
    sample_rows_.reserve(static_cast<size_t>(runtime.spec().max_logit_rows));
    left_rows_.reserve(static_cast<size_t>(runtime.spec().max_logit_rows));
    ahead_items_.reserve(most);
  }
  record_gauges(true);
}

Loop::~Loop() { forget_ahead(); }

// ---------------------------------------------------------------- rounds

void Loop::run() {
  int failures = 0;
  while (take_inbox()) {
    try {
      if (!round()) wait();
      failures = 0;
    } catch (...) {
      // Not of any one request (those are caught where they happen): memory was short for a moment. After a
      // few rounds somebody has to give way.
      if (++failures < 3) continue;
      const Id id = scheduler_.running() > 0 ? scheduler_.running_ids().back() : scheduler_.first_waiting();
      if (id >= 0) fail(id, std::current_exception());
    }
  }
  record_gauges(true);
}

bool Loop::turn() { return take_inbox() && round(); }

bool Loop::round() {
  if (lost_) return fail_all();
  try {
    return plan_and_step();
  } catch (...) {
    note_loss(std::current_exception());
    if (!lost_) throw;
    return true;
  }
}

bool Loop::plan_and_step() {
  const double begin = recorder_.now();
  cache_.poll();
  poll_loading();
  if (!ahead_items_.empty()) {
    items_.swap(ahead_items_);
    ahead_items_.clear();
    finish_ahead();
    record_round(begin);
    return true;
  }
  if (options_.speculation != Speculation::kOff) propose_drafts();
  const double planning = recorder_.now();
  const sched::Plan& plan = scheduler_.plan(planning, *this, rates_);
  const bool moved = carry_out(plan);
  const double stepping = recorder_.now();
  Recorder::add(recorder_.schedule_s, stepping - begin);
  if (!items_.empty()) step(items_);
  record_round(begin);
  if (moved || !items_.empty()) return true;
  if (!loading_.empty()) return false;
  // Somebody wants to run and nobody can: what it needs is not there at all.
  const Id stuck = scheduler_.running() > 0 ? scheduler_.running_ids().front() : scheduler_.first_waiting();
  if (stuck < 0) return false;
  Sample& sample = *samples_[stuck];
  std::exception_ptr error = sample.failure;
  if (!error) {
    error = std::make_exception_ptr(
        Error(ErrorCode::kNoMemory, fmt::format("kv cache: {} tokens do not fit the pool, expected a smaller "
                                                "request or a larger pool",
                                                sample.tokens.size())));
  }
  fail(stuck, error);
  return true;
}

// The step of items_ is under way.
void Loop::finish_ahead() {
  try {
    finish(items_, ahead_rows_, ahead_begin_, true);
  } catch (...) {
    std::erase_if(items_, [](const Item& item) { return item.sample == nullptr; });
    retry(items_, std::current_exception());
  }
}

void Loop::record_round(double begin) {
  record_gauges(false);
  const uint64_t generated = recorder_.generated_tokens.load(std::memory_order_relaxed);
  if (!items_.empty() && decoding_) {
    Recorder::add(recorder_.decode_s, recorder_.now() - begin);
    Recorder::add(recorder_.decode_tokens, generated - generated_);
  }
  generated_ = generated;
}

void Loop::wait() {
  record_gauges(true);
  std::unique_lock lock(inbox_->mutex);
  const auto news = [&] {
    return !inbox_->jobs.empty() || !inbox_->cancelled.empty() || inbox_->stop || inbox_->poked;
  };
  const double deadline = scheduler_.next_deadline();
  // A read from disk that is lost must not stop everything: look again now and then.
  constexpr double kLookAgain = 0.1;
  const double at_most = loading_.empty() ? deadline : std::min(deadline, recorder_.now() + kLookAgain);
  if (at_most == kNever) {
    inbox_->news.wait(lock, news);
  } else {
    const auto until = recorder_.start + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                             std::chrono::duration<double>(at_most));
    inbox_->news.wait_until(lock, until, news);
  }
  inbox_->poked = false;
}

// False when the engine is to end.
bool Loop::take_inbox() {
  bool stop = false, drain = false;
  {
    const std::lock_guard lock(inbox_->mutex);
    new_jobs_.swap(inbox_->jobs);
    new_cancels_.swap(inbox_->cancelled);
    stop = inbox_->stop;
    drain = inbox_->drain;
  }
  for (std::shared_ptr<Job>& job : new_jobs_) admit(std::move(job));
  new_jobs_.clear();
  for (const Inbox::Cancel& cancel : new_cancels_) {
    const auto found = ids_of_.find(cancel.request);
    if (found == ids_of_.end()) continue;
    for (const Id id : found->second) {
      const Sample& sample = *samples_[id];
      // Before the samples fork, the first stands for all of them.
      const bool one =
          sample.index == cancel.sample && (sample.job->request.samples == 1 || sample.job->forked);
      if (cancel.sample < 0 || one) scheduler_.cancel(id);
    }
  }
  new_cancels_.clear();
  if (!stop) return true;
  if (drain) return !ids_of_.empty();
  stop_all();
  return false;
}

void Loop::stop_all() {
  for (size_t id = 0; id < samples_.size(); ++id) {
    if (samples_[id]) end(static_cast<Id>(id), FinishReason::kCancelled);
  }
}

// The device is lost: nobody's request can help it, so everybody is told.
bool Loop::fail_all() {
  forget_ahead();
  bool any = false;
  for (size_t id = 0; id < samples_.size(); ++id) {
    if (!samples_[id]) continue;
    fail(static_cast<Id>(id), lost_);
    any = true;
  }
  record_gauges(false);
  return any;
}

sched::Id Loop::new_id() {
  if (free_ids_.empty()) {
    scheduler_.reserve(static_cast<Id>(samples_.size()) + 1);
    free_ids_.reserve(samples_.size() + 1);
    loading_.reserve(samples_.size() + 1);
    samples_.emplace_back();
    free_ids_.push_back(static_cast<Id>(samples_.size()) - 1);
  }
  const Id id = free_ids_.back();
  free_ids_.pop_back();
  return id;
}

void Loop::admit(std::shared_ptr<Job> job) {
  Job& j = *job;
  j.open = j.request.samples;
  Recorder::add(recorder_.submitted, 1);
  if (lost_) return fail_job(j, lost_);
  try {
    auto sample = std::make_unique<Sample>(job, 0, std::move(*j.sampler));
    sample->tokens.assign(j.prompt->tokens.begin(), j.prompt->tokens.end());
    sample->prompt = j.prompt;
    std::vector<Id>& ids = ids_of_[j.stream->id];
    ids.reserve(static_cast<size_t>(j.request.samples));
    const Id id = new_id();
    ids.push_back(id);
    const auto since_start = [&](std::chrono::steady_clock::time_point t) {
      return std::chrono::duration<double>(t - recorder_.start).count();
    };
    j.arrival_s = since_start(j.arrival);
    const auto length = static_cast<int32_t>(sample->tokens.size());
    sample->usage.prompt_tokens = length;
    samples_[id] = std::move(sample);
    scheduler_.add(id, {.priority = j.request.priority,
                        .time = j.arrival_s,
                        .deadline = j.request.deadline ? since_start(*j.request.deadline) : kNever,
                        .tokens = length,
                        .samples = j.request.samples});
  } catch (...) {
    fail_job(j, std::current_exception());
  }
}

void Loop::poll_loading() {
  for (size_t i = 0; i < loading_.size();) {
    const Id id = loading_[i];
    Sample& sample = *samples_[id];
    try {
      if (!cache_.ready(sample.blocks)) {
        ++i;
        continue;
      }
    } catch (...) {
      fail(id, std::current_exception());  // which takes it out of loading_
      continue;
    }
    scheduler_.stands_at(id, sample.blocks.length(), false);
    if (!sample.served) sample.usage.cached_tokens = sample.blocks.cached_tokens();
    loading_[i] = loading_.back();
    loading_.pop_back();
  }
}

// ---------------------------------------------------------------- what a plan says

bool Loop::carry_out(const sched::Plan& plan) {
  items_.clear();
  for (const Id id : plan.cancelled) end(id, FinishReason::kCancelled);
  for (const Id id : plan.expired) end(id, FinishReason::kDeadline);
  const auto guarded = [&](Id id, const auto& body) {
    try {
      body();
    } catch (...) {
      fail(id, std::current_exception());
    }
  };
  for (const auto& preemption : plan.preempted) guarded(preemption.id, [&] { preempt(preemption); });
  // Those that run reserve before those that start (whose work comes last): what a start finds may differ
  // from what was promised.
  size_t work = 0;
  const size_t running = plan.work.size() - plan.started_work;
  for (; work < running; ++work) guarded(plan.work[work].id, [&] { collect(plan.work[work]); });
  for (const auto& s : plan.started) guarded(s.id, [&] { start(s); });
  for (; work < plan.work.size(); ++work) guarded(plan.work[work].id, [&] { collect(plan.work[work]); });
  return !plan.cancelled.empty() || !plan.expired.empty() || !plan.preempted.empty() || !plan.started.empty();
}

void Loop::preempt(const sched::Plan::Preemption& preemption) {
  Sample& sample = *samples_[preemption.id];
  ++sample.usage.preemptions;
  sample.draft_blocks.reset();
  const auto loading = std::find(loading_.begin(), loading_.end(), preemption.id);
  if (loading != loading_.end()) loading_.erase(loading);
  if (preemption.swap) {
    if (cache_.swap_out(sample.blocks)) {
      Recorder::add(recorder_.preemptions_swap, 1);
      return;
    }
    scheduler_.not_swapped(preemption.id);
  }
  Recorder::add(recorder_.preemptions_recompute, 1);
  sample.prompt = cache_.make_prompt(sample.tokens, sample.job->request.cache_salt);
  sample.blocks.reset();
}

void Loop::start(const sched::Plan::Start& start) {
  Sample& sample = *samples_[start.id];
  if (start.swapped && !cache_.swap_in(sample.blocks)) {
    sample.prompt = cache_.make_prompt(sample.tokens, sample.job->request.cache_salt);
    sample.blocks.reset();
  }
  if (!sample.blocks) {
    // All that this sample will ever hold, so that no later step allocates.
    const Request& request = sample.job->request;
    const int64_t most = static_cast<int64_t>(runtime_.context()) + 1;
    const int64_t asked = static_cast<int64_t>(sample.prompt_tokens()) + request.max_tokens;
    const auto capacity = static_cast<size_t>(request.max_tokens > 0 ? std::min(most, asked) : most);
    sample.tokens.reserve(capacity + static_cast<size_t>(options_.max_draft) + 1);
    sample.picked.reserve(static_cast<size_t>(options_.max_draft) + 1);
    if (options_.speculation != Speculation::kOff)
      sample.drafts.reserve(static_cast<size_t>(options_.max_draft));
    if (options_.speculation == Speculation::kLookup) sample.lookup.reserve(capacity);
    if (sample.constraint) sample.mask.resize((static_cast<size_t>(runtime_.config().vocab) + 63) / 64);
    if (request.embedding && !sample.hidden) {
      sample.hidden.emplace(*request.embedding, sample.prompt_tokens(), runtime_.config().hidden);
    }
    sample.blocks = sample.needs_every_row() ? cache_.make_sequence(request.cache_salt)
                                             : cache_.attach(std::move(sample.prompt));
    sample.prompt.reset();
    if (!sample.served) sample.usage.cached_tokens = sample.blocks.cached_tokens();
  }
  const bool loading = sample.blocks.state() == kv::Sequence::State::kLoading;
  scheduler_.stands_at(start.id, sample.blocks.length(), loading);
  if (loading) loading_.push_back(start.id);
}

// Turns planned work into an item of the step, with its blocks reserved.
void Loop::collect(const sched::Work& work) {
  Sample* sample = samples_[work.id].get();
  if (sample == nullptr || sample->blocks.state() != kv::Sequence::State::kActive) return;
  const int32_t computed = sample->blocks.length();
  const int32_t missing = static_cast<int32_t>(sample->tokens.size()) - computed;
  const int32_t tokens = std::min(work.tokens, missing);
  const bool last = tokens == missing;
  int32_t drafts =
      last && tokens == 1 ? std::min(work.drafts, static_cast<int32_t>(sample->drafts.size())) : 0;
  if (!cache_.reserve(sample->blocks, tokens + drafts)) {
    drafts = 0;
    if (!cache_.reserve(sample->blocks, tokens)) return;  // the next plan knows better
  }
  items_.push_back({.id = work.id, .sample = sample, .tokens = tokens, .drafts = drafts, .last = last});
}

// ---------------------------------------------------------------- ends

void Loop::release(Id id) noexcept {
  const uint64_t request = samples_[id]->job->stream->id;
  const auto found = ids_of_.find(request);
  if (found != ids_of_.end()) {
    std::erase(found->second, id);
    if (found->second.empty()) ids_of_.erase(found);
  }
  std::erase(loading_, id);
  for (Item& item : ahead_items_) {
    if (item.id == id) item.sample = nullptr;
  }
  samples_[id].reset();
  free_ids_.push_back(id);
}

void Loop::end_sample(Id id, Event&& event) noexcept {
  scheduler_.finish(id);
  const std::shared_ptr<Job> job = samples_[id]->job;
  Sample& sample = *samples_[id];
  const double now = recorder_.now();
  sample.usage.total_s = now - job->arrival_s;
  event.usage = sample.usage;
  recorder_.request_time.add(sample.usage.total_s);
  const bool unforked = sample.index == 0 && job->request.samples > 1 && !job->forked;
  event.sample = sample.index;
  release(id);
  const FinishReason reason = event.finish;
  // Samples that never came to be end with the one that was to become them.
  for (int32_t i = 1; unforked && i < job->request.samples; ++i) {
    Event same;
    same.kind = event.kind;
    same.finish = reason;
    same.code = event.code;
    same.sample = i;
    job->stream->finish(std::move(same));
    --job->open;
  }
  job->stream->finish(std::move(event));
  if (--job->open > 0) return;
  Recorder::add(reason == FinishReason::kCancelled  ? recorder_.cancelled
                : reason == FinishReason::kDeadline ? recorder_.expired
                : reason == FinishReason::kError    ? recorder_.failed
                                                    : recorder_.finished,
                1);
}

void Loop::end(Id id, FinishReason reason) {
  Event event;
  event.kind = Event::Kind::kFinished;
  event.finish = reason;
  try {
    event.text = samples_[id]->text.finish();
  } catch (...) {
    fail(id, std::current_exception());
    return;
  }
  end_sample(id, std::move(event));
}

void describe(Event& event, const std::exception_ptr& error) noexcept {
  event.kind = Event::Kind::kFailed;
  event.finish = FinishReason::kError;
  try {
    try {
      std::rethrow_exception(error);
    } catch (const Error& e) {
      event.code = e.code();
      event.error = e.what();
    } catch (const std::bad_alloc&) {
      event.code = ErrorCode::kNoMemory;
      event.error = "out of memory";  // short enough to need none
    } catch (const std::exception& e) {
      event.code = ErrorCode::kInternal;
      event.error = e.what();
    }
  } catch (...) {
    event.error = "out of memory";
  }
}

bool Loop::is_of_device(const std::exception_ptr& error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return e.code() == ErrorCode::kDevice;
  } catch (...) {
    return false;
  }
}

// The first failure of the device: a round later everybody has it.
void Loop::note_loss(const std::exception_ptr& error) noexcept {
  if (lost_ || !is_of_device(error)) return;
  lost_ = error;
  Event event;
  describe(event, error);
  const std::lock_guard lock(inbox_->mutex);
  inbox_->failure = std::move(event.error);
}

void Loop::fail(Id id, std::exception_ptr error) noexcept {
  note_loss(error);
  if (!samples_[id]) return;
  Event event;
  describe(event, error);
  end_sample(id, std::move(event));
}

// One that never became a sample.
void Loop::fail_job(Job& job, std::exception_ptr error) noexcept {
  ids_of_.erase(job.stream->id);
  for (int32_t i = 0; i < job.request.samples; ++i) {
    Event event;
    describe(event, error);
    event.sample = i;
    job.stream->finish(std::move(event));
  }
  Recorder::add(recorder_.failed, 1);
}

// ---------------------------------------------------------------- memory, as the scheduler sees it

int32_t Loop::available(int group) const { return cache_.available(group); }

Counts Loop::to_grow(Id id, int32_t tokens) const {
  return cache_.blocks_to_reserve(samples_[id]->blocks, tokens);
}

sched::Memory::Start Loop::to_start(Id id) const {
  Sample& sample = *samples_[id];
  const int32_t known = static_cast<int32_t>(sample.tokens.size());
  Start start;
  const size_t groups = runtime_.spec().kv_groups.size();
  if (sample.blocks) {  // swapped out
    start.blocks = cache_.blocks_to_swap_in(sample.blocks);
    for (size_t g = 0; g < groups; ++g) ++start.blocks[g];  // for the token it is about to compute
    return start;
  }
  const kv::Match match = sample.needs_every_row() ? kv::Match{} : cache_.match(*sample.prompt);
  start.computed = match.tokens;
  start.loading = match.from_disk > 0;
  for (size_t g = 0; g < groups; ++g) {
    int32_t more = blocks_for(known) - blocks_for(match.tokens);
    const int32_t window = runtime_.spec().kv_groups[g].window;
    if (window > 0) more = std::min(more, blocks_for(window) + blocks_for(options_.limits.step_tokens) + 1);
    start.blocks[g] = match.takes[g] + more;
  }
  return start;
}

Counts Loop::freed_by(Id id) const {
  const Sample& sample = *samples_[id];
  return sample.blocks ? cache_.blocks_of_its_own(sample.blocks) : Counts{};
}

double Loop::swap_seconds(Id id) const {
  const kv::SwapCost cost = cache_.swap_cost(samples_[id]->blocks);
  return cost.fits ? cost.out_seconds + cost.in_seconds : kNever;
}

// ---------------------------------------------------------------- gauges

void Loop::record_gauges(bool all) {
  const auto set = [](auto& gauge, int64_t value) { gauge.store(value, std::memory_order_relaxed); };
  set(recorder_.running, scheduler_.running());
  set(recorder_.waiting, scheduler_.waiting());
  set(recorder_.swapped, scheduler_.swapped());
  constexpr uint64_t kEvery = 32;  // rounds: the cache's own counts are not free
  if (!all && ++rounds_ % kEvery != 0) return;
  const kv::CacheStats stats = cache_.stats();
  int64_t total = 0, free = 0, cached = 0, held = 0;
  for (const auto& group : stats.groups) {
    total += group.total;
    free += group.free;
    cached += group.cached;
    held += group.held + group.loading;
  }
  set(recorder_.blocks_total, total);
  set(recorder_.blocks_free, free);
  set(recorder_.blocks_cached, cached);
  set(recorder_.blocks_held, held);
  set(recorder_.ram_blocks, stats.ram.blocks);
  set(recorder_.ram_bytes, static_cast<int64_t>(stats.ram.bytes));
  set(recorder_.disk_blocks, stats.disk.blocks);
  set(recorder_.disk_bytes, static_cast<int64_t>(stats.disk.bytes));
  const auto count = [](Recorder::Counter& c, uint64_t value) { c.store(value, std::memory_order_relaxed); };
  count(recorder_.cache_queries, stats.prompt_tokens);
  count(recorder_.hits_pool, stats.main.hit_tokens);
  count(recorder_.hits_ram, stats.ram.hit_tokens);
  count(recorder_.hits_disk, stats.disk.hit_tokens);
}

}  // namespace millrace
