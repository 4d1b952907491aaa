// WorkBudget: how long the reading of one request may take on the thread that reads it, and who may stop it.
// Parsers, tokenizers and compilers say what they do by spend_work(); now and then that looks at the clock
// and at the stop token, and throws WorkEnded when there is nothing left. Without a budget nothing is
// counted.
//
//   const WorkBudget budget({.deadline = now + 10s, .stop = source.get_token()});
//   compile(...);  // calls spend_work() in its loops
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <stop_token>

namespace millrace {

// Not an Error: nobody between the loop and the one who gave the budget is to take it for bad input.
class WorkEnded : public std::exception {
 public:
  enum class Why { kTimeUp, kSliceUsed, kCancelled };
  explicit WorkEnded(Why why) : why_(why) {}
  Why why() const { return why_; }
  const char* what() const noexcept override;

 private:
  Why why_;
};

struct WorkLimits {
  using Clock = std::chrono::steady_clock;
  Clock::time_point deadline = Clock::time_point::max();
  // Of processor time of this thread, which others that run beside it do not use up.
  std::chrono::nanoseconds slice = std::chrono::nanoseconds::max();
  std::stop_token stop = {};
};

// In force on this thread as long as it lives; the one before it returns afterwards.
class WorkBudget {
 public:
  explicit WorkBudget(WorkLimits limits);
  ~WorkBudget() { active_ = previous_; }
  WorkBudget(const WorkBudget&) = delete;
  WorkBudget& operator=(const WorkBudget&) = delete;

  // A step is some ten nanoseconds of work.
  static void spend(size_t steps) {
    WorkBudget* const budget = active_;
    if (budget == nullptr) return;
    budget->left_ -= static_cast<int64_t>(steps);
    if (budget->left_ < 0) budget->look();
  }

 private:
  static constexpr int64_t kStepsBetweenLooks = 5000;
  void look();

  static thread_local WorkBudget* active_;
  WorkBudget* const previous_;
  const WorkLimits limits_;
  const std::chrono::nanoseconds slice_end_;  // of the thread's processor time
  int64_t left_ = kStepsBetweenLooks;
};

inline void spend_work(size_t steps = 1) { WorkBudget::spend(steps); }

}  // namespace millrace
