#include "engine/rank_recovery.h"

#include "engine/rank_front.h"
#include "engine/ranks_lost.h"

namespace millrace {

bool RankRecovery::ready() {
  RankFront* const front = runtime_.front();
  if (front == nullptr) return true;
  if (!forming_) {
    if (front->up()) return true;
    lose(std::make_exception_ptr(RanksLost(front->loss())));
    return false;
  }
  planner_.plan_ends();
  if (!front->up()) return false;
  try {
    runtime_.attach_ranks();
    forming_ = false;
  } catch (const RanksLost&) {  // the new ones too
    front->form_again();
  }
  return !forming_;
}

void RankRecovery::lose(const std::exception_ptr& error) {
  forming_ = true;
  for (sched::Id id = 0; !options_.restart && id < samples_.end(); ++id) {
    if (!samples_.holds(id) || !samples_[id].served || scheduler_.is_swapped(id)) continue;
    delivery_.fail(id, error);
  }
  planner_.forget_computed();
  runtime_.cache().forget_main();
  runtime_.front()->form_again();
}

}  // namespace millrace
