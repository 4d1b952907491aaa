// Planner: requests come, start, give way and are asked into a step. It asks the scheduler for a plan and
// carries it out: ends who is cancelled or late, swaps out or drops who gives way, starts who may start, and
// reserves blocks for everybody who computes. What comes out is the step's items.
#pragma once

#include <memory>

#include "base/buffer_pool.h"
#include "engine/cache_memory.h"
#include "engine/delivery.h"
#include "engine/recorder.h"
#include "engine/runtime.h"
#include "engine/sample_table.h"
#include "engine/step_item.h"
#include "sched/scheduler.h"

namespace millrace {

class Planner {
 public:
  using Id = sched::Id;

  Planner(Runtime& runtime, SampleTable& samples, sched::Scheduler& scheduler, Delivery& delivery,
          Recorder& recorder, const EngineOptions& options);

  void admit(std::shared_ptr<Job> job);
  void cancel(const Inbox::Cancel& cancel);  // in the next plan
  // Those whose blocks have come from disk may compute.
  void poll_loading();
  // Plans and carries it out; `items` is then the step. True when anything but the step came of it.
  bool plan(const sched::Rates& rates, Buffer<StepItem>& items);
  // Ends who is cancelled or late, for a time in which nobody can step.
  void plan_ends();
  // The device has lost what it held: everybody starts over, but those who are swapped out.
  void forget_computed();
  // For a plan that nothing came of: somebody wants to run and nobody can, so what it needs is not there at
  // all. Fails the first of them; false when there is none.
  bool fail_stuck();
  // Everything computed so far is lost: those who run begin anew with the tokens they have.
  void start_all_over();
  // Fails the last in order of service, for an error that is nobody's own.
  void fail_lowest(const std::exception_ptr& error) noexcept;

 private:
  void start_over(Sample& sample);
  void preempt(const sched::Plan::Preemption& preemption);
  void start(const sched::Plan::Start& start);
  void make_blocks(Sample& sample);
  void reserve_buffers(Sample& sample) const;
  void collect(const sched::Work& work, Buffer<StepItem>& items);
  int32_t whole_images(const Sample& sample, int32_t tokens);

  Runtime& runtime_;
  kv::Cache& cache_;
  SampleTable& samples_;
  sched::Scheduler& scheduler_;
  Delivery& delivery_;
  Recorder& recorder_;
  const EngineOptions& options_;
  const CacheMemory memory_;
  int32_t spare_logits_ = 0;  // rows of this plan's step beyond those that tokens are picked from
  int32_t spare_rows_ = 0;    // of the step that is planned, for images
};

}  // namespace millrace
