// Loop: the engine's thread. Each round: take in requests, ask the scheduler for a plan, do what it says, run
// one ragged step, pick tokens, tell clients. Everything here runs on that thread; clients touch the inbox,
// their streams and the recorder only.
//
// What goes wrong belongs to a request: a step that throws is run again for each sequence alone, and the one
// that fails gets the error as its last event. The rest go on.
#pragma once

#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/job.h"
#include "engine/recorder.h"
#include "engine/runtime.h"
#include "sched/scheduler.h"

namespace millrace {

struct LoopOptions {
  sched::Limits limits;
  Speculation speculation = Speculation::kOff;
  int32_t max_draft = 8;
};

class Loop final : private sched::Memory {
 public:
  Loop(Runtime& runtime, std::unique_ptr<ModelDrafter> drafter, const LoopOptions& options,
       std::shared_ptr<Inbox> inbox, Recorder& recorder);
  ~Loop() override;

  void run();  // until the inbox says stop
  // Takes the inbox and does one round, without waiting: what run() repeats, for tests that look in between.
  // False when there was nothing to do.
  bool turn();
  bool device_lost() const { return lost_ != nullptr; }

 private:
  using Id = sched::Id;
  struct Item {  // one sequence's part of the step
    Id id;
    Sample* sample;
    int32_t tokens, drafts;
    bool last;
    size_t row = 0;         // of its first logits
    int32_t first_row = 0;  // of its tokens in the batch
    bool masked = false;    // sample->mask says which tokens are allowed now
  };

  // --- loop.cpp: requests come, start, give way and end
  bool round();
  bool plan_and_step();
  void finish_ahead();
  void record_round(double begin);
  void wait();
  bool take_inbox();
  void stop_all();
  bool fail_all();
  void admit(std::shared_ptr<Job> job);
  Id new_id();
  void poll_loading();
  bool carry_out(const sched::Plan& plan);
  void preempt(const sched::Plan::Preemption& preemption);
  void start(const sched::Plan::Start& start);
  void collect(const sched::Work& work);
  void end(Id id, FinishReason reason);
  void fail(Id id, std::exception_ptr error) noexcept;
  static bool is_of_device(const std::exception_ptr& error) noexcept;
  void note_loss(const std::exception_ptr& error) noexcept;
  void fail_job(Job& job, std::exception_ptr error) noexcept;
  void end_sample(Id id, Event&& event) noexcept;
  void release(Id id) noexcept;
  void record_gauges(bool all);

  // --- sched::Memory
  int32_t available(int group) const override;
  sched::Counts to_grow(Id id, int32_t tokens) const override;
  Start to_start(Id id) const override;
  sched::Counts freed_by(Id id) const override;
  double swap_seconds(Id id) const override;

  // --- step.cpp: one step and what comes of it
  void propose_drafts();
  void step(std::span<Item> items);
  void retry(std::span<Item> items, const std::exception_ptr& error);
  struct Rows {  // of a step
    int32_t all = 0, prompts = 0;
    size_t logits = 0;
  };
  struct Picks {                          // what tokens are picked from
    std::span<const SampledRow> sampled;  // by the device; empty: it does not
    std::span<const float> logits;        // [logit rows, vocabulary], of the rows that it left
  };
  void forward(std::span<Item> items);
  Rows prepare(std::span<Item> items, double now);
  void finish(std::span<Item> items, const Rows& rows, double begin, bool on_device);
  void record_step(const Rows& rows, size_t batch, double model_s, double sample_s);
  void pool_hidden(Item& item);
  void deliver_embedding(Id id, const Sample& sample);
  void after_step(Item& item);
  void fork_samples(const Item& item, std::span<const float> logits);
  bool deliver(Id id, Sample& sample, const SampledToken& token, int32_t fed);

  // --- pick.cpp: tokens
  bool forks(const Item& item) const;
  bool device_may_pick(const Item& item) const;
  bool sample_on_device(std::span<Item> items, const Rows& rows);
  void make_masks(std::span<Item> items);
  static bool fill_mask(Sample& sample);
  Picks wait_for(std::span<const Item> items, bool on_device);
  void pick_all(std::span<Item> items, const Picks& picks);
  void pick(Item& item, const Picks& picks);
  SampledToken pick_row(const Item& item, size_t row, const Picks& picks);
  bool may_go_ahead(std::span<const Item> items) const;
  void go_ahead(std::span<const Item> items);
  void forget_ahead() noexcept;

  Runtime& runtime_;
  kv::Cache& cache_;
  std::unique_ptr<ModelDrafter> drafter_;
  LoopOptions options_;
  std::shared_ptr<Inbox> inbox_;
  Recorder& recorder_;
  sched::Scheduler scheduler_;
  std::exception_ptr lost_;  // what the device failed with: it stays failed

  std::vector<std::unique_ptr<Sample>> samples_;  // by id
  std::vector<Id> free_ids_;
  std::vector<Id> loading_;
  std::unordered_map<uint64_t, std::vector<Id>> ids_of_;  // of a request, those not ended
  std::vector<std::shared_ptr<Job>> new_jobs_;
  std::vector<Inbox::Cancel> new_cancels_;

  Buffer<Item> items_;
  Buffer<Slice> slices_;
  Buffer<int32_t> fed_;  // tokens and drafts of those that have drafts
  Buffer<ModelDrafter::Item> draft_items_;
  Buffer<SampleRow> sample_rows_;
  Buffer<int32_t> left_rows_;  // that the device did not pick from
  // The step that was launched before this one's tokens were read; empty: none. Those who have ended since
  // have no sample.
  Buffer<Item> ahead_items_;
  Rows ahead_rows_;
  double ahead_begin_ = 0, last_computed_ = 0;
  StepCost decode_cost_;
  sched::Rates rates_;
  uint64_t rounds_ = 0;
  uint64_t generated_ = 0;  // tokens, until the round before
  bool decoding_ = false;   // the last step had no prompts
};

// Makes `event` the last one of a sample that failed. Needs no memory when there is none.
void describe(Event& event, const std::exception_ptr& error) noexcept;

}  // namespace millrace
