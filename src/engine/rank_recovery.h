// RankRecovery: what the engine's thread does when the ranks that compute for it are lost (rank_front.h).
// Their memory is gone, the tokens are here: who ran is computed again from them, in the group that is formed
// anew, or gets an error; who waits goes on waiting. What the cache has in RAM and on disk stays. Who ran in
// several groups that were lost, and got no token in between, gets an error too: it may be why.
#pragma once

#include <exception>

#include "engine/delivery.h"
#include "engine/planner.h"
#include "engine/runtime.h"

namespace millrace {

class RankRecovery {
 public:
  RankRecovery(Runtime& runtime, SampleTable& samples, const sched::Scheduler& scheduler, Delivery& delivery,
               Planner& planner, const EngineOptions& options)
      : runtime_(runtime),
        samples_(samples),
        scheduler_(scheduler),
        delivery_(delivery),
        planner_(planner),
        options_(options) {}

  // May a step be made? False while ranks are lost: they are being started, and nobody can step.
  bool ready();
  bool forming() const { return forming_; }
  // A step, or a move of blocks, has thrown this RanksLost.
  void lose(const std::exception_ptr& error);

 private:
  void lose_running(sched::Id id, const std::exception_ptr& error);

  Runtime& runtime_;
  SampleTable& samples_;
  const sched::Scheduler& scheduler_;
  Delivery& delivery_;
  Planner& planner_;
  const EngineOptions& options_;
  bool forming_ = false;
  bool attaching_ = false;  // the group is there, and loads
};

}  // namespace millrace
