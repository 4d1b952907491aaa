#include "engine/step_pipeline.h"

#include "base/check.h"
#include "engine/ranks_lost.h"

namespace millrace {

StepPipeline::StepPipeline(Runtime& runtime, SampleTable& samples, sched::Scheduler& scheduler,
                           Delivery& delivery, StepMeter& meter, Recorder& recorder,
                           const EngineOptions& options, int32_t draft_rows)
    : runtime_(runtime),
      delivery_(delivery),
      meter_(meter),
      recorder_(recorder),
      batcher_(runtime, recorder, options.max_running, draft_rows),
      picker_(runtime),
      ahead_(runtime, samples, scheduler, recorder, options),
      committer_(runtime, samples, scheduler, picker_, delivery, recorder, options) {}

void StepPipeline::run(std::span<StepItem> items) {
  try {
    forward(items);
  } catch (...) {
    retry(items, std::current_exception());
  }
}

void StepPipeline::run_step_ahead(Buffer<StepItem>& items) {
  const StepAhead::Step step = ahead_.take(items);
  try {
    finish(items, step.rows, step.begin, true);
  } catch (...) {
    std::erase_if(items, [](const StepItem& item) { return item.sample == nullptr; });
    retry(items, std::current_exception());
  }
}

// Whose fault it was shows when each runs alone. Nothing has advanced: computing it again is harmless.
void StepPipeline::retry(std::span<StepItem> items, const std::exception_ptr& error) {
  ahead_.forget();                                          // it stands on tokens that nobody got
  if (RanksLost::is(error)) std::rethrow_exception(error);  // nobody's fault here: the loop knows what to do
  if (items.size() == 1 || DeviceLoss::is_of_device(error)) {
    for (const StepItem& item : items) delivery_.fail(item.id, error);
    return;
  }
  for (StepItem& item : items) run({&item, 1});
}

void StepPipeline::forward(std::span<StepItem> items) {
  const double begin = recorder_.now();
  const StepRows rows = batcher_.launch(items, begin);
  const bool on_device = picker_.start(items, rows);
  finish(items, rows, begin, on_device);
}

// The rest of a step that is launched: `on_device`, and its tokens are being picked.
void StepPipeline::finish(std::span<StepItem> items, const StepRows& rows, double begin, bool on_device) {
  if (on_device) ahead_.launch(items);
  const double waiting = recorder_.now();
  const Picks picks = picker_.wait(items, on_device);
  MILLRACE_CHECK(picks.left.empty() || !ahead_.under_way());  // its logits would be the next step's
  const double computed = recorder_.now();
  Recorder::add(recorder_.wait_s, computed - waiting);
  if (runtime_.spares_logits()) {
    const size_t gathered = picks.logits.size() / static_cast<size_t>(runtime_.config().vocab);
    Recorder::add(recorder_.rows_gathered, gathered);
    Recorder::add(recorder_.rows_picked_by_ranks, picks.sampled.size() - picks.left.size());
  }
  picker_.pick_all(items, picks);
  commit(items, picks);
  meter_.record(rows, items.size(), begin, computed);
}

void StepPipeline::commit(std::span<StepItem> items, const Picks& picks) {
  for (StepItem& item : items) {
    if (item.sample == nullptr || !item.forks()) continue;
    try {
      committer_.fork(item, picks.logits);
    } catch (...) {
      item.sample->failure = std::current_exception();
    }
  }
  for (const StepItem& item : items) {
    if (item.sample != nullptr) committer_.commit(item);
  }
}

}  // namespace millrace
