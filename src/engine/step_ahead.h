// StepAhead: the next step, launched before anybody has read this one's tokens. Where the device samples, the
// token a row computes may be "what row r of the step before picked", so the device need not wait for us.
// Whoever ends by length is left out; whoever ends by a token leaves a row behind that nobody reads.
#pragma once

#include <cstdint>
#include <span>

#include "base/buffer_pool.h"
#include "engine/recorder.h"
#include "engine/runtime.h"
#include "engine/sample_table.h"
#include "engine/step_item.h"
#include "sched/scheduler.h"

namespace millrace {

class StepAhead {
 public:
  StepAhead(Runtime& runtime, const SampleTable& samples, const sched::Scheduler& scheduler,
            const Recorder& recorder, const EngineOptions& options);
  ~StepAhead() { forget(); }
  StepAhead(const StepAhead&) = delete;
  StepAhead& operator=(const StepAhead&) = delete;

  // The device picks the tokens of `items`: launches the step after it, when the plan for that is known
  // without asking for one.
  void launch(std::span<const StepItem> items);
  bool under_way() const { return !items_.empty(); }
  struct Step {
    StepRows rows;
    double begin = 0;
  };
  // The step that is under way becomes the current one: its items, of which those that have ended since have
  // no sample.
  Step take(Buffer<StepItem>& items);
  // Nobody will read it.
  void forget() noexcept;

 private:
  bool may_launch(std::span<const StepItem> items) const;
  bool ends_by_length(const StepItem& item) const;
  bool add(const StepItem& item);

  Runtime& runtime_;
  const SampleTable& samples_;
  const sched::Scheduler& scheduler_;
  const Recorder& recorder_;
  const EngineOptions& options_;
  Buffer<StepItem> items_;
  Buffer<Slice> slices_;
  Buffer<SampleRow> rows_;
  Step step_;
};

}  // namespace millrace
