// RoundRecorder: what a round of the engine's thread leaves in the statistics: who runs and waits, what the
// cache holds, and the time that decoding took.
#pragma once

#include <cstdint>

#include "engine/recorder.h"
#include "kv/cache.h"
#include "sched/scheduler.h"

namespace millrace {

class RoundRecorder {
 public:
  RoundRecorder(const sched::Scheduler& scheduler, const kv::Cache& cache, Recorder& recorder)
      : scheduler_(scheduler), cache_(cache), recorder_(recorder) {}

  // A round that began at `begin` is over; `decoded`: it was a step without prompts.
  void round(double begin, bool decoded);
  // all: the cache's counts too, which else come now and then.
  void gauges(bool all);

 private:
  void cache_gauges();

  const sched::Scheduler& scheduler_;
  const kv::Cache& cache_;
  Recorder& recorder_;
  uint64_t rounds_ = 0;
  uint64_t generated_ = 0;  // tokens, until the round before
};

}  // namespace millrace
