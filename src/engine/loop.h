// Loop: the engine's thread. Each round: take in requests, draft, plan, step, tell clients. It owns the
// objects that do it and decides in which order they run; each has a header of its own. Everything here runs
// on that thread; clients touch the inbox, their event streams and the recorder only.
//
//   Planner       who starts, gives way, ends early; the items of the step
//   Drafting      guesses for those who decode
//   StepPipeline  Batcher -> Picker -> Committer, with StepAhead beside them
//   Delivery      events, and the end of every sample
#pragma once

#include <memory>
#include <vector>

#include "engine/delivery.h"
#include "engine/device_loss.h"
#include "engine/drafting.h"
#include "engine/planner.h"
#include "engine/rank_recovery.h"
#include "engine/round_recorder.h"
#include "engine/sample_table.h"
#include "engine/step_meter.h"
#include "engine/step_pipeline.h"
#include "sched/scheduler.h"

namespace millrace {

class Loop {
 public:
  // All that is passed by reference, the options too, must outlive the loop.
  Loop(Runtime& runtime, std::unique_ptr<ModelDrafter> drafter, const EngineOptions& options,
       std::shared_ptr<Inbox> inbox, Recorder& recorder);

  void run();  // until the inbox says stop
  // Takes the inbox and does one round, without waiting: what run() repeats, for tests that look in between.
  // False when there was nothing to do.
  bool turn();
  bool device_lost() const { return static_cast<bool>(loss_); }

 private:
  bool take_inbox();
  bool round();
  bool plan_and_step();
  void recover();
  void wait();

  Runtime& runtime_;
  kv::Cache& cache_;
  const EngineOptions& options_;
  const std::shared_ptr<Inbox> inbox_;
  Recorder& recorder_;
  const sched::Limits limits_;
  sched::Scheduler scheduler_;
  SampleTable samples_;
  DeviceLoss loss_;
  StepMeter meter_;
  Delivery delivery_;
  Planner planner_;
  Drafting drafting_;
  StepPipeline step_;
  RoundRecorder rounds_;
  RankRecovery ranks_;

  Buffer<StepItem> items_;  // of the step
  std::vector<std::shared_ptr<Job>> new_jobs_;
  std::vector<Inbox::Cancel> new_cancels_;
};

}  // namespace millrace
