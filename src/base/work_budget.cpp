// The looks at the clock; see work_budget.h.
#include "base/work_budget.h"

#include <ctime>
#include <utility>

namespace millrace {
namespace {

std::chrono::nanoseconds thread_time() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

}  // namespace

thread_local WorkBudget* WorkBudget::active_ = nullptr;

const char* WorkEnded::what() const noexcept {
  switch (why_) {
    case Why::kTimeUp:
      return "the time for this work is up";
    case Why::kSliceUsed:
      return "this work takes longer than its first slice of time";
    case Why::kCancelled:
      break;
  }
  return "nobody waits for this work any more";
}

WorkBudget::WorkBudget(WorkLimits limits)
    : previous_(active_),
      limits_(std::move(limits)),
      slice_end_(limits_.slice == std::chrono::nanoseconds::max() ? limits_.slice
                                                                  : thread_time() + limits_.slice) {
  active_ = this;
}

void WorkBudget::look() {
  // Stays below zero when it throws: who goes on all the same is stopped at the next step.
  if (limits_.stop.stop_requested()) throw WorkEnded(WorkEnded::Why::kCancelled);
  if (WorkLimits::Clock::now() >= limits_.deadline) throw WorkEnded(WorkEnded::Why::kTimeUp);
  if (slice_end_ != std::chrono::nanoseconds::max() && thread_time() >= slice_end_) {
    throw WorkEnded(WorkEnded::Why::kSliceUsed);
  }
  left_ = kStepsBetweenLooks;
}

}  // namespace millrace
