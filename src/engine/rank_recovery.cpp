#include "engine/rank_recovery.h"

#include <fmt/format.h>

#include "engine/rank_front.h"
#include "engine/ranks_lost.h"

namespace millrace {
namespace {

constexpr int32_t kMostLosses = 3;  // of ranks, while they compute the same token of a request

}  // namespace

bool RankRecovery::ready() {
  RankFront* const front = runtime_.front();
  if (front == nullptr) return true;
  if (!forming_) {
    if (front->up()) return true;
    lose(std::make_exception_ptr(RanksLost(front->loss())));
    return false;
  }
  planner_.plan_ends();
  try {
    if (!front->up()) {
      if (attaching_) throw RanksLost(front->loss());
      return false;
    }
    if (!attaching_) runtime_.attach_ranks();
    attaching_ = true;
    forming_ = !runtime_.ranks_attached();
    attaching_ = forming_;
  } catch (const RanksLost&) {  // the new ones too
    attaching_ = false;
    front->form_again();
  }
  return !forming_;
}

void RankRecovery::lose(const std::exception_ptr& error) {
  forming_ = true;
  for (sched::Id id = 0; id < samples_.end(); ++id) {
    if (!samples_.holds(id) || !samples_[id].served || scheduler_.is_swapped(id)) continue;
    if (!options_.restart) {
      delivery_.fail(id, error);
    } else if (samples_[id].blocks) {
      lose_running(id, error);
    }
  }
  planner_.forget_computed();
  runtime_.cache().forget_main();
  runtime_.front()->form_again();
}

void RankRecovery::lose_running(sched::Id id, const std::exception_ptr& error) {
  Sample& sample = samples_[id];
  const bool same_token = sample.losses > 0 && sample.lost_at == sample.generated();
  sample.losses = same_token ? sample.losses + 1 : 1;
  sample.lost_at = sample.generated();
  if (sample.losses < kMostLosses) return;
  std::string why;
  try {
    std::rethrow_exception(error);
  } catch (const RanksLost& loss) {
    why = loss.what();
  }
  delivery_.fail(id, std::make_exception_ptr(RanksLost(fmt::format(
                         "{}; ranks were lost {} times while they computed the same token of this request",
                         why, sample.losses))));
}

}  // namespace millrace
