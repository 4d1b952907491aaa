// Drafting: which of those who run get drafts for the next step, how many, and from where: the request's own
// text (LookupDrafter) or a small model (ModelDrafter). Drafts are a hope, not a promise: without them a step
// is only slower.
#pragma once

#include <cstdint>
#include <memory>

#include "base/buffer_pool.h"
#include "engine/drafter.h"
#include "engine/sample_table.h"
#include "engine/step_meter.h"
#include "sched/scheduler.h"

namespace millrace {

class Drafting {
 public:
  // drafter: null unless drafts come from a model. context: tokens of a sequence. draft_rows: of a step.
  Drafting(SampleTable& samples, sched::Scheduler& scheduler, const StepMeter& meter,
           std::unique_ptr<ModelDrafter> drafter, const EngineOptions& options, int32_t context,
           int32_t draft_rows);

  // Before each plan: drafts for everybody who decodes, and the scheduler knows how many. Nothing when
  // speculation is off.
  void propose();

 private:
  struct Costs {  // in units of a step without drafts
    double row, draft;
  };
  Costs costs() const;
  int32_t max_drafts(const Sample& sample, int32_t left) const;
  int32_t propose_for(Sample& sample, int32_t left, const Costs& costs);
  void run_model();

  SampleTable& samples_;
  sched::Scheduler& scheduler_;
  const StepMeter& meter_;
  const std::unique_ptr<ModelDrafter> drafter_;
  const EngineOptions& options_;
  const int32_t context_, draft_rows_;
  Buffer<ModelDrafter::Item> items_;
};

}  // namespace millrace
