// StepPipeline: one step from its items to its events: batch, pick, commit, and the step after it launched
// ahead. A step that throws is run again for each sequence alone, and the one that fails gets the error as
// its last event; the rest go on.
#pragma once

#include <exception>
#include <span>

#include "base/buffer_pool.h"
#include "engine/batcher.h"
#include "engine/committer.h"
#include "engine/delivery.h"
#include "engine/picker.h"
#include "engine/step_ahead.h"
#include "engine/step_item.h"
#include "engine/step_meter.h"

namespace millrace {

class StepPipeline {
 public:
  StepPipeline(Runtime& runtime, SampleTable& samples, sched::Scheduler& scheduler, Delivery& delivery,
               StepMeter& meter, Recorder& recorder, const EngineOptions& options, int32_t draft_rows);

  void run(std::span<StepItem> items);
  // A step was launched ahead: it is the next one, whatever else there is to do.
  bool has_step_ahead() const { return ahead_.under_way(); }
  void run_step_ahead(Buffer<StepItem>& items);  // which become that step's
  void forget_step_ahead() noexcept { ahead_.forget(); }

 private:
  void forward(std::span<StepItem> items);
  void finish(std::span<StepItem> items, const StepRows& rows, double begin, bool on_device);
  void commit(std::span<StepItem> items, const Picks& picks);
  void retry(std::span<StepItem> items, const std::exception_ptr& error);

  Runtime& runtime_;
  Delivery& delivery_;
  StepMeter& meter_;
  Recorder& recorder_;
  Batcher batcher_;
  Picker picker_;
  StepAhead ahead_;
  Committer committer_;
};

}  // namespace millrace
