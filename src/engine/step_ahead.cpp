#include "engine/step_ahead.h"

#include "base/check.h"
#include "engine/picker.h"

namespace millrace {

StepAhead::StepAhead(Runtime& runtime, const SampleTable& samples, const sched::Scheduler& scheduler,
                     const Recorder& recorder, const EngineOptions& options)
    : runtime_(runtime), samples_(samples), scheduler_(scheduler), recorder_(recorder), options_(options) {
  if (!runtime.executor().works_ahead()) return;
  const auto count = static_cast<size_t>(options.max_running);
  items_.reserve(count);
  slices_.reserve(count);
  rows_.reserve(count);
}

// Does the next step of everybody who runs depend on nothing that is known only here?
bool StepAhead::may_launch(std::span<const StepItem> items) const {
  if (!runtime_.executor().works_ahead()) return false;
  if (options_.speculation != Speculation::kOff || !samples_.loading().empty()) return false;
  if (!scheduler_.quiet(recorder_.now())) return false;
  int32_t live = 0;
  for (const StepItem& item : items) {
    if (item.sample == nullptr) continue;
    ++live;
    const Sample& sample = *item.sample;
    if (item.drafts > 0 || !Picker::device_may_pick(item) || sample.constraint ||
        sample.sampler.has_penalties() || !Picker::device_row(sample.sampler, 0).simple()) {
      return false;
    }
  }
  return live == scheduler_.running();
}

bool StepAhead::ends_by_length(const StepItem& item) const {
  const Sample& sample = *item.sample;
  const int32_t asked = sample.job->request.max_tokens;
  return sample.blocks.length() + item.tokens + 1 >= runtime_.context() ||
         (asked > 0 && sample.usage.generated_tokens + 1 >= asked);
}

// False: the pool has no block left for it.
bool StepAhead::add(const StepItem& item) {
  static constexpr int32_t kUnknown[1] = {0};
  Sample& sample = *item.sample;
  if (!runtime_.cache().reserve(sample.blocks, item.tokens + 1)) return false;
  slices_.push_back({.sequence = &sample.blocks,
                     .tokens = kUnknown,
                     .ahead = item.tokens,
                     .sampled_row = static_cast<int32_t>(item.row),
                     .adapter = sample.job->adapter,
                     .sparse_pages = sample.job->sparse_pages,
                     .images = sample.job->images});
  rows_.push_back(Picker::device_row(sample.sampler, 1));
  items_.push_back({.id = item.id,
                    .life = item.life,
                    .sample = &sample,
                    .tokens = 1,
                    .drafts = 0,
                    .last = true,
                    .row = items_.size(),
                    .first_row = static_cast<int32_t>(items_.size())});
  return true;
}

void StepAhead::launch(std::span<const StepItem> items) {
  if (!may_launch(items)) return;
  step_.begin = recorder_.now();
  slices_.clear();
  rows_.clear();
  for (const StepItem& item : items) {
    if (item.sample == nullptr || ends_by_length(item)) continue;
    if (!add(item)) {
      items_.clear();
      return;  // a plan has to free blocks
    }
  }
  if (items_.empty()) return;
  step_.rows = {.all = static_cast<int32_t>(slices_.size()), .prompts = 0, .logits = slices_.size()};
  try {
    runtime_.launch(slices_);
    MILLRACE_CHECK(runtime_.executor().sample(rows_));
  } catch (...) {
    items_.clear();  // the plain step will show what is wrong
  }
}

StepAhead::Step StepAhead::take(Buffer<StepItem>& items) {
  for (StepItem& item : items_) item.sample = samples_.find(item.id, item.life);
  items.swap(items_);
  items_.clear();
  return step_;
}

void StepAhead::forget() noexcept {
  if (items_.empty()) return;
  items_.clear();
  try {
    runtime_.executor().sampled();
  } catch (...) {  // the fault of the step before, or one that shows again
  }
}

}  // namespace millrace
