// How long a plan takes with 1,000 sequences running and 10,000 waiting, and while they come and go.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "sched/scheduler.h"

namespace {

using namespace millrace;
using namespace millrace::sched;

constexpr Id kRunning = 1000, kWaiting = 10000;

class Counting final : public Memory {
 public:
  std::vector<int32_t> tokens = std::vector<int32_t>(kRunning + kWaiting, 0);
  int32_t available(int) const override { return 1 << 20; }
  Counts to_grow(Id id, int32_t n) const override {
    const int32_t b = blocks_for(tokens[id] + n) - blocks_for(tokens[id]);
    return {b, b};
  }
  Start to_start(Id) const override { return {.blocks = {7, 7}, .computed = 0, .loading = false}; }
  Counts freed_by(Id id) const override { return {blocks_for(tokens[id]), blocks_for(tokens[id])}; }
  double swap_seconds(Id) const override { return kNever; }
};

double processor_seconds() {
  timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// One engine's round: plan, and tell what was computed. `turnover` sequences end and as many start.
double microseconds_per_step(int turnover) {
  Scheduler scheduler(
      {.groups = 2, .step_tokens = 2048, .logit_rows = 1024, .max_running = kRunning, .ageing = 0.1});
  Counting memory;
  for (Id id = 0; id < kRunning + kWaiting; ++id) {
    scheduler.add(id, {.priority = id % 3, .time = 1e-3 * id, .deadline = kNever, .tokens = 1, .samples = 1});
  }
  constexpr int kWarm = 20, kSteps = 200;
  double start = 0;
  double now = 100;
  for (int step = 0; step < kWarm + kSteps; ++step) {
    if (step == kWarm) start = processor_seconds();
    const Plan& plan = scheduler.plan(now, memory, {.prompt_tok_s = 1e6});
    int left = turnover;
    for (const Work& work : plan.work) {
      if (left-- > 0) {
        scheduler.finish(work.id);
        memory.tokens[work.id] = 0;
        scheduler.add(
            work.id,
            {.priority = work.id % 3, .time = now, .deadline = now + 1e6, .tokens = 1, .samples = 1});
        continue;
      }
      memory.tokens[work.id] += work.tokens;
      scheduler.update(work.id, memory.tokens[work.id], memory.tokens[work.id] + 1);
    }
    now += 0.01;
  }
  return 1e6 * (processor_seconds() - start) / kSteps;
}

}  // namespace

int main() {
  std::printf("%d running, %d waiting: processor time of one step\n", kRunning, kWaiting);
  for (const int turnover : {0, 10, 100}) {
    double best = 1e9;
    for (int i = 0; i < 5; ++i) best = std::min(best, microseconds_per_step(turnover));
    std::printf("  %3d end and start in each step: %8.1f us\n", turnover, best);
  }
  return 0;
}
