// Work ends when it is told to, when its time is up and when its slice is used, and not before.
#include "base/work_budget.h"

#include <gtest/gtest.h>

#include <optional>
#include <thread>

namespace millrace {
namespace {

using namespace std::chrono_literals;

// Spends until it is stopped, at most a minute; why it was.
std::optional<WorkEnded::Why> work() {
  const auto end = std::chrono::steady_clock::now() + 1min;
  try {
    while (std::chrono::steady_clock::now() < end) spend_work(100);
  } catch (const WorkEnded& ended) {
    return ended.why();
  }
  return std::nullopt;
}

TEST(WorkBudget, WithoutOneNothingIsCounted) {
  for (int i = 0; i < 100'000; ++i) spend_work(1000);
}

TEST(WorkBudget, EndsAtItsDeadlineAndStaysEnded) {
  const WorkBudget budget({.deadline = std::chrono::steady_clock::now() + 20ms});
  EXPECT_EQ(work(), WorkEnded::Why::kTimeUp);
  EXPECT_THROW(spend_work(), WorkEnded);
}

TEST(WorkBudget, EndsWhenItIsCancelledFromAnotherThread) {
  std::stop_source source;
  const WorkBudget budget({.stop = source.get_token()});
  std::jthread other([&] {
    std::this_thread::sleep_for(10ms);
    source.request_stop();
  });
  EXPECT_EQ(work(), WorkEnded::Why::kCancelled);
}

TEST(WorkBudget, ASliceIsProcessorTimeNotTheClock) {
  const WorkBudget budget({.slice = 20ms});
  std::this_thread::sleep_for(50ms);
  EXPECT_NO_THROW(spend_work(10'000));  // looks, and little was used
  EXPECT_EQ(work(), WorkEnded::Why::kSliceUsed);
}

TEST(WorkBudget, TheOneBeforeReturns) {
  const WorkBudget outer({});
  {
    const WorkBudget inner({.deadline = std::chrono::steady_clock::now() - 1s});
    EXPECT_THROW(spend_work(10'000), WorkEnded);
  }
  EXPECT_NO_THROW(spend_work(10'000));
}

}  // namespace
}  // namespace millrace
