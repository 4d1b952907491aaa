// Scheduler: which sequences step next, with how many tokens, and who gives way. Plain data out: it knows
// numbers of tokens and blocks, no model, no bytes and no clock, and is tested without any of them.
//
//   running sequences come first, in order of their keys: one token each, then their drafts
//   prompts fill the rest of the step's budget in chunks
//   what waits starts while its whole prompt and one block more for everybody fit
//   when blocks run out the lowest key gives way: swapped out when that is cheaper than computing it again;
//   so does one that is more than a level below what waits
//
// Ageing: priority + ageing * (now - arrival) orders two requests the same way at any time, so the key
// priority - ageing * arrival says it once and for all, and waiting costs nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/paging.h"

namespace millrace::sched {

using Id = int32_t;  // small and dense: the caller reuses them
using Counts = std::array<int32_t, kMaxKvCounts>;

inline constexpr double kNever = std::numeric_limits<double>::infinity();

struct Limits {
  int32_t groups = 1;          // numbers of blocks that are counted: per group, or per shelf of it
  int32_t step_tokens = 512;   // rows of a step
  int32_t logit_rows = 64;     // rows of a step that give logits
  int32_t max_running = 64;    // at most step_tokens and logit_rows
  int32_t draft_rows = 16;     // rows of a step that may be drafts
  double chunk_s = 0.25;       // how long a prompt may keep the others' tokens waiting
  double ageing = 0.1;         // levels of priority per second
  bool whole_prompts = false;  // a prompt is one step's, or waits: none is longer than a step
};

// What the scheduler asks about memory while it plans. The answers must not change meanwhile.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual int32_t available(int group) const = 0;
  // Blocks that `tokens` more of a running sequence take.
  virtual Counts to_grow(Id id, int32_t tokens) const = 0;
  struct Start {
    Counts blocks{};       // for everything known of it: what is found, brought back and computed
    int32_t computed = 0;  // tokens that need not be computed
    bool loading = false;  // they come later: it starts without a step
  };
  virtual Start to_start(Id id) const = 0;
  virtual Counts freed_by(Id id) const = 0;      // when it is preempted
  virtual double swap_seconds(Id id) const = 0;  // out and in again; kNever when it cannot be swapped
};

struct Rates {
  double prompt_tok_s = 0;  // measured; 0: not yet
};

struct Arrival {
  int32_t priority = 0;
  double time = 0;  // seconds, of the clock that plan() is told
  double deadline = kNever;
  int32_t tokens = 0;   // of the prompt
  int32_t samples = 1;  // it will fork into so many
};

struct Work {
  Id id;
  int32_t tokens;  // known tokens to compute, from where it stands
  int32_t drafts;  // and so many drafts behind them
  bool last;       // all it knows is computed then: a token can be sampled
};

struct Plan {
  std::vector<Id> cancelled, expired;  // gone already: free everything they hold
  struct Preemption {
    Id id;
    bool swap;
  };
  std::vector<Preemption> preempted;  // before anything grows
  struct Start {
    Id id;
    bool swapped;  // was swapped out before
    bool loading;
  };
  std::vector<Start> started;
  std::vector<Work> work;   // those that start come last:
  size_t started_work = 0;  // so many
  int32_t rows = 0;
  bool empty() const {
    return cancelled.empty() && expired.empty() && preempted.empty() && started.empty() && work.empty();
  }
};

class Scheduler {
 public:
  explicit Scheduler(const Limits& limits);

  // Room for ids below `count`: until then nothing allocates but this.
  void reserve(Id count);
  void add(Id id, const Arrival& arrival);
  void cancel(Id id);  // in the next plan
  // A running parent has become several samples; the child stands where the parent stands.
  void fork(Id parent, Id child);
  void drop_sample(Id parent);  // one of its samples will not be
  void finish(Id id);           // running: it ended and holds nothing any more
  // After a step: so many tokens are computed, so many are known (more than computed).
  void update(Id id, int32_t computed, int32_t known);
  void want_drafts(Id id, int32_t drafts);
  // What became of a start, when that is not what to_start() said: how much it has, whether it still waits
  // for the rest.
  void stands_at(Id id, int32_t computed, bool loading);
  void not_swapped(Id id);  // the swap of the last plan failed: it is computed again
  // What was computed of it is lost: it waits, and starts from nothing.
  void start_over(Id id);
  bool is_swapped(Id id) const { return entries_[static_cast<size_t>(id)].swapped; }

  const Plan& plan(double now, const Memory& memory, const Rates& rates);
  // Who was cancelled and whose deadline is over, and nothing else: for a time in which nobody can step.
  const Plan& plan_ends(double now);

  const std::vector<Id>& running_ids() const { return running_; }  // in order of service
  Id first_waiting();                                              // -1: nobody waits
  int32_t running() const { return static_cast<int32_t>(running_.size()); }
  int32_t waiting() const { return waiting_count_; }
  int32_t swapped() const { return swapped_count_; }
  // Would plan() let everybody who runs go on, and do nothing else but that? As far as is known without
  // asking for memory.
  bool quiet(double now) const { return waiting_count_ == 0 && doomed_.empty() && now < next_deadline(); }
  // When plan() could have something to say without a call in between; kNever: not.
  double next_deadline() const;

 private:
  enum class State : uint8_t { kNone, kWaiting, kRunning, kLoading };
  struct Entry {
    double key = 0;
    double deadline = kNever;
    int32_t priority = 0, samples = 1;
    int32_t computed = 0, known = 0, drafts = 0;
    State state = State::kNone;
    bool swapped = false, cancelled = false;
    bool preempted = false, started = false;  // by the plan being made
    uint32_t life = 0;                        // which use of this id: stale heap items differ
  };
  struct Waiting {
    double key;
    Id id;
    uint32_t life;
  };
  struct Due {
    double time;
    Id id;
    uint32_t life;
  };

  static bool served_after(const Waiting& a, const Waiting& b);
  static bool due_after(const Due& a, const Due& b);
  bool before(Id a, Id b) const;  // in order of service
  void insert_running(Id id);
  void push_waiting(Id id);
  void drop_stale();
  void forget(Id id);
  void clear_plan();
  void end_those_due(double now, const Memory* memory);
  bool fits(const Counts& need, int32_t headroom) const;
  void take(const Counts& need);
  void give(const Counts& freed);
  void preempt(Id id, const Memory& memory, const Rates& rates);
  bool preempt_for(Id id, const Counts& blocks, const Memory& memory, const Rates& rates);
  void plan_running(const Memory& memory, const Rates& rates);
  void plan_drafts(const Memory& memory);
  void plan_prompts(const Memory& memory, const Rates& rates);
  void plan_chunk(Id id, const Memory& memory);
  void plan_starts(const Memory& memory, const Rates& rates);
  void start(Id id, const Memory::Start& how);

  Limits limits_;
  std::vector<Entry> entries_;
  std::vector<Id> running_;       // in order of service; kRunning and kLoading
  std::vector<Waiting> waiting_;  // heap, best key on top; may hold stale items
  std::vector<Due> due_;          // heap, earliest on top; may hold stale items
  std::vector<Id> doomed_;        // cancelled since the last plan
  int32_t waiting_count_ = 0, swapped_count_ = 0;
  int32_t slots_ = 0;  // samples that run or will once their prompts are computed

  // Of the plan being made.
  Plan plan_;
  Counts left_{};
  int32_t rows_left_ = 0, logits_left_ = 0, prompt_left_ = 0;
};

}  // namespace millrace::sched
