#include "engine/loop.h"

#include <algorithm>
#include <cstdio>

#include "engine/engine_options.h"
#include "engine/ranks_lost.h"

namespace millrace {

Loop::Loop(Runtime& runtime, std::unique_ptr<ModelDrafter> drafter, const EngineOptions& options,
           std::shared_ptr<Inbox> inbox, Recorder& recorder)
    : runtime_(runtime),
      cache_(runtime.cache()),
      options_(options),
      inbox_(std::move(inbox)),
      recorder_(recorder),
      limits_(limits_of(options, runtime.spec(), runtime.config().encoder)),
      scheduler_(limits_),
      samples_(limits_.max_running),
      loss_(inbox_, !options.fallback.empty()),
      meter_(recorder, limits_.step_tokens),
      delivery_(samples_, scheduler_, loss_, recorder, runtime.context()),
      planner_(runtime, samples_, scheduler_, delivery_, recorder, options),
      drafting_(samples_, scheduler_, meter_, std::move(drafter), options, runtime.context(),
                limits_.draft_rows),
      step_(runtime, samples_, scheduler_, delivery_, meter_, recorder, options, limits_.draft_rows),
      rounds_(scheduler_, cache_, recorder),
      ranks_(runtime, samples_, scheduler_, delivery_, planner_, options) {
  items_.reserve(static_cast<size_t>(limits_.max_running));
  rounds_.gauges(true);
}

void Loop::run() {
  int failures = 0;
  while (take_inbox()) {
    try {
      if (!round()) wait();
      failures = 0;
    } catch (...) {
      // Not of any one request (those are caught where they happen): memory was short for a moment. After a
      // few rounds somebody has to give way.
      if (++failures >= 3) planner_.fail_lowest(std::current_exception());
    }
  }
  rounds_.gauges(true);
}

bool Loop::turn() { return take_inbox() && round(); }

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
  for (std::shared_ptr<Job>& job : new_jobs_) {
    Recorder::add(recorder_.submitted, 1);
    if (loss_ && !loss_.may_recover()) {
      delivery_.fail_job(*job, loss_.error());
    } else {
      planner_.admit(std::move(job));
    }
  }
  new_jobs_.clear();
  for (const Inbox::Cancel& cancel : new_cancels_) planner_.cancel(cancel);
  new_cancels_.clear();
  if (!stop) return true;
  if (drain) return !samples_.empty();
  delivery_.end_all(FinishReason::kCancelled);
  return false;
}

bool Loop::round() {
  if (loss_.may_recover()) recover();
  if (loss_) {  // nobody's request can help it, so everybody is told
    step_.forget_step_ahead();
    const bool any = delivery_.fail_all(loss_.error());
    rounds_.gauges(false);
    return any;
  }
  if (!ranks_.ready()) return false;
  try {
    return plan_and_step();
  } catch (const RanksLost&) {
    step_.forget_step_ahead();
    ranks_.lose(std::current_exception());
    return true;
  } catch (...) {
    loss_.note(std::current_exception());
    if (!loss_) throw;
    return true;
  }
}

// The device is lost: the CPU goes on with everybody's tokens, or nobody does.
void Loop::recover() {
  step_.forget_step_ahead();
  try {
    runtime_.fall_back_to_cpu(options_.threads);
    planner_.start_all_over();
    loss_.recovered();
    const std::lock_guard lock(inbox_->mutex);
    std::fprintf(stderr, "millrace: %s\n", inbox_->fallback.c_str());
  } catch (...) {
    loss_.not_recovered(std::current_exception());
  }
}

bool Loop::plan_and_step() {
  const double begin = recorder_.now();
  cache_.poll();
  planner_.poll_loading();
  if (step_.has_step_ahead()) {
    step_.run_step_ahead(items_);
    rounds_.round(begin, !items_.empty() && meter_.decoding());
    return true;
  }
  drafting_.propose();
  const bool moved = planner_.plan(meter_.rates(), items_);
  Recorder::add(recorder_.schedule_s, recorder_.now() - begin);
  const bool steps = !items_.empty();
  if (steps) step_.run(items_);
  rounds_.round(begin, steps && meter_.decoding());
  if (moved || steps) return true;
  return samples_.loading().empty() && planner_.fail_stuck();
}

void Loop::wait() {
  rounds_.gauges(true);
  std::unique_lock lock(inbox_->mutex);
  const auto news = [&] {
    return !inbox_->jobs.empty() || !inbox_->cancelled.empty() || inbox_->stop || inbox_->poked;
  };
  const double deadline = scheduler_.next_deadline();
  // A read from disk that is lost must not stop everything: look again now and then.
  constexpr double kLookAgain = 0.1;
  const bool news_may_be_lost = !samples_.loading().empty() || ranks_.forming();
  const double until_s = news_may_be_lost ? std::min(deadline, recorder_.now() + kLookAgain) : deadline;
  if (until_s == sched::kNever) {
    inbox_->news.wait(lock, news);
  } else {
    const auto until = recorder_.start + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                             std::chrono::duration<double>(until_s));
    inbox_->news.wait_until(lock, until, news);
  }
  inbox_->poked = false;
}

}  // namespace millrace
