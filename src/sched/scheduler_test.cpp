// The scheduler against a memory that only counts: order, budgets, admission, preemption, and random loads.
#include "sched/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace millrace::sched {
namespace {

// Blocks by the book: a full group, and a window group that keeps its window.
class Blocks final : public Memory {
 public:
  struct Held {
    int32_t tokens = 0, known = 0;
    bool swapped = false, running = false;
  };
  explicit Blocks(int32_t total, int32_t window = 0) : total_{total, total}, window_(window) {}

  int32_t held(int g, int32_t tokens) const {
    const int32_t first = g == 0 || window_ == 0 ? 0 : std::max(0, tokens - window_ + 1) / kBlockTokens;
    return blocks_for(tokens) - first;
  }
  int32_t used(int g) const {
    int32_t sum = 0;
    for (const auto& [id, h] : sequences) sum += h.running ? held(g, h.tokens) : 0;
    return sum;
  }
  int32_t available(int g) const override { return total_[g] - used(g); }
  Counts to_grow(Id id, int32_t tokens) const override {
    ++calls;
    const Held& h = sequences.at(id);
    const int32_t n = blocks_for(h.tokens + tokens) - blocks_for(h.tokens);
    return {n, n};
  }
  Start to_start(Id id) const override {
    ++calls;
    const Held& h = sequences.at(id);
    const int32_t n = blocks_for(h.known);
    return {.blocks = {n, window_ == 0 ? n : std::min(n, blocks_for(window_) + 34)},
            .computed = h.swapped ? h.tokens : 0};
  }
  Counts freed_by(Id id) const override {
    const Held& h = sequences.at(id);
    return {held(0, h.tokens), held(1, h.tokens)};
  }
  double swap_seconds(Id) const override { return swap_s; }

  std::map<Id, Held> sequences;
  double swap_s = kNever;
  mutable int64_t calls = 0;

 private:
  int32_t total_[2];
  int32_t window_;
};

struct Fixture {
  explicit Fixture(Limits limits, int32_t blocks = 1000) : memory(blocks), scheduler(limits) {}

  void add(Id id, int32_t tokens, int32_t priority = 0, double time = 0, double deadline = kNever) {
    scheduler.add(id, {.priority = priority, .time = time, .deadline = deadline, .tokens = tokens});
    memory.sequences[id] = {.tokens = 0, .known = tokens};
  }
  // Plans, and does what the plan says as an engine would; every sequence that may samples a token.
  const Plan& step(double now = 0) {
    const Plan& plan = scheduler.plan(now, memory, rates);
    for (const Id id : plan.cancelled) memory.sequences.erase(id);
    for (const Id id : plan.expired) memory.sequences.erase(id);
    for (const auto& p : plan.preempted) {
      Blocks::Held& h = memory.sequences[p.id];
      h.running = false;
      h.swapped = p.swap;
      if (!p.swap) h.tokens = 0;
    }
    for (const auto& s : plan.started) {
      memory.sequences[s.id].running = true;
      memory.sequences[s.id].swapped = false;
    }
    for (const Work& work : plan.work) {
      Blocks::Held& h = memory.sequences[work.id];
      EXPECT_TRUE(h.running);
      h.tokens += work.tokens;
      EXPECT_EQ(work.last, h.tokens == h.known);
      if (work.last) ++h.known;
      EXPECT_GE(memory.available(0), 0);
      scheduler.update(work.id, h.tokens, h.known);
    }
    return plan;
  }
  int32_t tokens_of(const Plan& plan, Id id) const {
    for (const Work& work : plan.work) {
      if (work.id == id) return work.tokens;
    }
    return 0;
  }

  Blocks memory;
  Scheduler scheduler;
  Rates rates;
};

TEST(Scheduler, RunningSequencesComeFirstAndPromptsFillTheRest) {
  Fixture f({.groups = 1, .step_tokens = 64, .logit_rows = 8, .max_running = 8});
  f.add(0, 10);
  f.step();  // computes the prompt, samples
  f.add(1, 100);
  const Plan& second = f.step();
  EXPECT_EQ(f.tokens_of(second, 0), 1);
  EXPECT_EQ(f.tokens_of(second, 1), 63) << "the rest of the budget";
  const Plan& third = f.step();
  EXPECT_EQ(f.tokens_of(third, 0), 1);
  EXPECT_EQ(f.tokens_of(third, 1), 37);
  EXPECT_EQ(third.rows, 38);
}

TEST(Scheduler, APromptTakesNoLongerThanItMayWhileOthersDecode) {
  Fixture f({.groups = 1, .step_tokens = 512, .logit_rows = 8, .max_running = 8, .chunk_s = 0.25});
  f.rates.prompt_tok_s = 200;
  f.add(0, 10);
  f.step();
  f.add(1, 400);
  EXPECT_EQ(f.tokens_of(f.step(), 1), 50);
  f.scheduler.finish(0);
  f.memory.sequences.erase(0);
  EXPECT_EQ(f.tokens_of(f.step(), 1), 350) << "nobody waits for a token any more";
}

TEST(Scheduler, WholePromptsAreNeverCut) {
  Fixture f({.groups = 1, .step_tokens = 64, .logit_rows = 8, .max_running = 8, .whole_prompts = true});
  f.rates.prompt_tok_s = 10;  // would be chunks of a block beside others
  f.add(0, 40);
  f.add(1, 40);
  f.add(2, 20);
  const Plan& first = f.step();
  EXPECT_EQ(f.tokens_of(first, 0), 40);
  EXPECT_EQ(f.tokens_of(first, 1), 0);  // does not fit any more, and nobody passes it
  EXPECT_EQ(f.tokens_of(first, 2), 0);
  const Plan& second = f.step();
  EXPECT_EQ(f.tokens_of(second, 0), 1);
  EXPECT_EQ(f.tokens_of(second, 1), 40);
  EXPECT_EQ(f.tokens_of(second, 2), 20);
}

TEST(Scheduler, PromptsMayAlwaysDoubleAStep) {
  Fixture f({.groups = 1, .step_tokens = 512, .logit_rows = 64, .max_running = 64, .chunk_s = 0.25});
  for (Id id = 0; id < 40; ++id) f.add(id, 8);
  f.step();
  f.rates.prompt_tok_s = 10;  // chunk_s would allow two tokens
  f.add(40, 200);
  EXPECT_EQ(f.tokens_of(f.step(), 40), 40);
}

TEST(Scheduler, HigherPrioritiesStartFirstAndWaitingMakesUpForALowerOne) {
  Fixture f({.groups = 1, .step_tokens = 8, .logit_rows = 8, .max_running = 8, .ageing = 0.1});
  f.add(0, 8, 0, 0.0);
  f.add(1, 8, 1, 0.0);
  f.add(2, 8, 1, 5.0);
  f.add(3, 8, 2, 25.0);  // 2 - 2.5: behind the one of priority 0 that came at 0
  std::vector<Id> order;
  while (order.size() < 4) {
    const Plan& plan = f.step(30.0);
    for (const auto& s : plan.started) order.push_back(s.id);
    for (const auto& s : plan.started) f.scheduler.finish(s.id);
    for (const auto& s : plan.started) f.memory.sequences.erase(s.id);
  }
  EXPECT_EQ(order, (std::vector<Id>{1, 2, 0, 3}));
}

TEST(Scheduler, NothingStartsThatCannotGoOneBlockFurther) {
  Fixture f({.groups = 1, .step_tokens = 512, .logit_rows = 8, .max_running = 8}, /*blocks=*/8);
  f.add(0, 3 * kBlockTokens);
  f.add(1, 3 * kBlockTokens);  // 3 + 3 held, and one more for each: 8
  f.add(2, 1);
  const Plan& plan = f.step();
  ASSERT_EQ(plan.started.size(), 2u);
  EXPECT_EQ(f.scheduler.waiting(), 1);
  Fixture tight({.groups = 1, .step_tokens = 512, .logit_rows = 8, .max_running = 8}, /*blocks=*/7);
  tight.add(0, 3 * kBlockTokens);
  tight.add(1, 3 * kBlockTokens);
  EXPECT_EQ(tight.step().started.size(), 1u);
}

TEST(Scheduler, TheLowestGivesWayWhenBlocksRunOut) {
  for (const bool swap : {false, true}) {
    Fixture f({.groups = 1, .step_tokens = 512, .logit_rows = 8, .max_running = 8}, /*blocks=*/8);
    f.rates.prompt_tok_s = 100;  // 64 tokens when blocks run out: 0.64 s
    f.memory.swap_s = swap ? 0.3 : 0.8;
    f.add(0, 3 * kBlockTokens, /*priority=*/0);
    f.add(1, 3 * kBlockTokens, /*priority=*/1);
    std::vector<Plan::Preemption> preempted;
    for (int i = 0; i < 20; ++i) {
      const Plan& plan = f.step();
      preempted.insert(preempted.end(), plan.preempted.begin(), plan.preempted.end());
    }
    ASSERT_EQ(preempted.size(), 1u);
    EXPECT_EQ(preempted[0].id, 0);
    EXPECT_EQ(preempted[0].swap, swap);
    EXPECT_EQ(f.scheduler.swapped(), swap ? 1 : 0);
    EXPECT_EQ(f.tokens_of(f.step(), 1), 1) << "the other goes on";
    f.scheduler.finish(1);
    f.memory.sequences.erase(1);
    const Plan& back = f.step();
    ASSERT_EQ(back.started.size(), 1u);
    EXPECT_EQ(back.started[0].swapped, swap);
    EXPECT_EQ(f.tokens_of(back, 0), swap ? 1 : f.memory.sequences[0].known - 1);
  }
}

TEST(Scheduler, AHigherPriorityTakesAPlaceThatALowerOneHolds) {
  Fixture f({.groups = 1, .step_tokens = 64, .logit_rows = 2, .max_running = 2});
  f.add(0, 8);
  f.add(1, 8);
  f.step();
  f.add(2, 8, /*priority=*/3, /*time=*/1.0);
  const Plan& plan = f.step(1.0);
  ASSERT_EQ(plan.preempted.size(), 1u);
  EXPECT_EQ(plan.preempted[0].id, 1);
  ASSERT_EQ(plan.started.size(), 1u);
  EXPECT_EQ(plan.started[0].id, 2);
  f.add(3, 8, /*priority=*/0, /*time=*/1.0);
  EXPECT_TRUE(f.step(1.0).preempted.empty()) << "an equal waits";
}

TEST(Scheduler, NobodyGivesWayInVain) {
  Fixture f({.groups = 1, .step_tokens = 512, .logit_rows = 8, .max_running = 8}, /*blocks=*/10);
  f.add(0, 5 * kBlockTokens, /*priority=*/9);
  f.add(1, 2 * kBlockTokens, /*priority=*/0);
  f.step();
  f.add(2, 6 * kBlockTokens, /*priority=*/5);  // all that 1 holds would not be enough
  const Plan& plan = f.step();
  EXPECT_TRUE(plan.preempted.empty());
  EXPECT_EQ(plan.work.size(), 2u);
}

TEST(Scheduler, CancellationAndDeadlinesTakeEffectInTheNextPlan) {
  Fixture f({.groups = 1, .step_tokens = 64, .logit_rows = 2, .max_running = 2});
  f.add(0, 8);
  f.add(1, 8, 0, 0.0, /*deadline=*/5.0);
  f.add(2, 8, 0, 0.0, /*deadline=*/4.0);  // waits
  f.step();
  EXPECT_EQ(f.scheduler.next_deadline(), 4.0);
  f.scheduler.cancel(0);
  f.scheduler.cancel(0);
  f.scheduler.cancel(77);
  const Plan& plan = f.step(4.5);
  EXPECT_EQ(plan.cancelled, std::vector<Id>{0});
  EXPECT_EQ(plan.expired, std::vector<Id>{2});
  EXPECT_EQ(f.scheduler.running(), 1);
  EXPECT_EQ(f.scheduler.waiting(), 0);
  EXPECT_EQ(f.step(6.0).expired, std::vector<Id>{1});
  f.add(0, 8);  // an id is used again: nothing of its past remains
  EXPECT_EQ(f.step(7.0).started.size(), 1u);
  EXPECT_EQ(f.scheduler.next_deadline(), kNever);
}

TEST(Scheduler, SamplesHoldTheirPlacesBeforeTheyFork) {
  Fixture f({.groups = 1, .step_tokens = 64, .logit_rows = 4, .max_running = 4});
  f.scheduler.add(0, {.tokens = 8, .samples = 3});
  f.memory.sequences[0] = {.tokens = 0, .known = 8};
  f.scheduler.add(1, {.tokens = 8, .samples = 2});
  f.memory.sequences[1] = {.tokens = 0, .known = 8};
  EXPECT_EQ(f.step().started.size(), 1u) << "3 + 2 are more than 4";
  for (const Id child : {2, 3}) {
    f.memory.sequences[child] = f.memory.sequences[0];
    f.scheduler.fork(0, child);
  }
  EXPECT_EQ(f.step().work.size(), 3u);
  f.scheduler.finish(2);
  f.memory.sequences.erase(2);
  const Plan& plan = f.step();
  EXPECT_EQ(plan.work.size(), 3u) << "two samples and the other prompt";
  EXPECT_EQ(plan.started.size(), 1u);
}

TEST(Scheduler, DraftsAreCutToWhatIsLeft) {
  Fixture f({.groups = 1, .step_tokens = 8, .logit_rows = 8, .max_running = 4, .draft_rows = 5});
  for (Id id = 0; id < 3; ++id) f.add(id, 2);
  f.step();
  for (Id id = 0; id < 3; ++id) f.scheduler.want_drafts(id, 4);
  const Plan& plan = f.scheduler.plan(0, f.memory, {});
  ASSERT_EQ(plan.work.size(), 3u);
  EXPECT_EQ(plan.work[0].drafts, 4);
  EXPECT_EQ(plan.work[1].drafts, 1);
  EXPECT_EQ(plan.work[2].drafts, 0);
  EXPECT_EQ(plan.rows, 8);
}

// Any load on a pool far too small ends, and no plan takes blocks that are not there.
TEST(Scheduler, RandomLoadsAlwaysEnd) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const auto pick = [&](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(random);
    };
    const int32_t longest = 16 * pick(1, 8);
    Fixture f({.groups = 1,
               .step_tokens = pick(4, 80),
               .logit_rows = pick(4, 80),
               .max_running = pick(1, 12),
               .ageing = 0.5},
              /*blocks=*/blocks_for(longest) + pick(0, 6));
    f.rates.prompt_tok_s = pick(0, 1) * 100.0;
    f.memory.swap_s = pick(0, 1) == 1 ? 0.01 * pick(1, 100) : kNever;
    std::map<Id, int32_t> ends;  // total length at which it is done
    const int count = pick(1, 20);
    for (Id id = 0; id < count; ++id) {
      const int32_t prompt = pick(1, longest - 1);
      f.add(id, prompt, pick(0, 3), 0.1 * id);
      ends[id] = pick(prompt + 1, longest);
    }
    int steps = 0;
    for (; !ends.empty() && steps < 20000; ++steps) {
      if (pick(0, 30) == 0) f.scheduler.cancel(pick(0, count - 1));
      const Plan plan = f.step(0.1 * steps);
      EXPECT_LE(plan.rows, 80);
      for (const Id id : plan.cancelled) ends.erase(id);
      for (const Work& work : plan.work) {
        if (!ends.contains(work.id) || f.memory.sequences[work.id].known < ends[work.id]) continue;
        f.scheduler.finish(work.id);
        f.memory.sequences.erase(work.id);
        ends.erase(work.id);
      }
    }
    EXPECT_TRUE(ends.empty()) << "round " << round << ": " << ends.size() << " did not end";
    EXPECT_EQ(f.scheduler.running() + f.scheduler.waiting(), 0);
  }
}

// What was computed is lost: everybody waits, nobody holds a block, and who is cancelled or late ends
// meanwhile.
TEST(Scheduler, StartsOverAfterALoss) {
  Fixture f({.groups = 1, .step_tokens = 64, .logit_rows = 64, .max_running = 4}, /*blocks=*/100);
  for (Id id = 0; id < 3; ++id) f.add(id, 20);
  f.step();
  f.step();
  ASSERT_EQ(f.scheduler.running(), 3);
  for (Id id = 0; id < 3; ++id) {
    f.scheduler.start_over(id);
    f.memory.sequences[id].tokens = 0;
    f.memory.sequences[id].running = false;
  }
  EXPECT_EQ(f.scheduler.running(), 0);
  EXPECT_EQ(f.scheduler.waiting(), 3);
  f.scheduler.cancel(1);
  EXPECT_EQ(f.scheduler.plan_ends(1.0).cancelled, std::vector<Id>{1});
  EXPECT_EQ(f.scheduler.waiting(), 2);
  const Plan plan = f.step(2.0);
  EXPECT_EQ(plan.started.size(), 2u);
  for (const Work& work : plan.work) EXPECT_GT(work.tokens, 1) << "from its first token on";
}

// What a plan asks of memory grows with what runs, not with what waits.
TEST(Scheduler, APlanCostsNothingForThoseWhoWait) {
  const auto calls_with = [](int32_t waiting) {
    Fixture f({.groups = 1, .step_tokens = 1024, .logit_rows = 1024, .max_running = 1000}, 100000);
    for (Id id = 0; id < 1000; ++id) f.add(id, 1);
    while (f.scheduler.running() < 1000) f.step();
    for (Id id = 1000; id < 1000 + waiting; ++id) f.add(id, 100);
    f.memory.calls = 0;
    f.scheduler.plan(1.0, f.memory, f.rates);
    return f.memory.calls;
  };
  const int64_t few = calls_with(10), many = calls_with(10000);
  EXPECT_EQ(few, many);
  EXPECT_LE(many, 1000 + 2);
}

}  // namespace
}  // namespace millrace::sched
