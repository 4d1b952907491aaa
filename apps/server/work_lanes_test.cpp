// Small requests pass large ones, a full queue says so, and what nobody waits for ends.
#include "work_lanes.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>
#include <future>

namespace millrace::server {
namespace {

using namespace std::chrono_literals;

std::chrono::nanoseconds thread_time() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

// Spends work for as long as the body says, in milliseconds of this thread, however busy the machine is;
// "forever" until it is stopped.
Reply spend(const HttpRequest& request, const Client&, const WorkLimits& limits) {
  const WorkBudget budget(limits);
  const std::string time = request.body.substr(0, request.body.find(' '));
  const auto end = thread_time() + (time == "forever" ? 1h : std::stoi(time) * 1ms);
  try {
    while (thread_time() < end) spend_work(100);
  } catch (const WorkEnded& ended) {
    if (ended.why() == WorkEnded::Why::kSliceUsed) return {.unfinished = true};
    return {.response = {.status = ended.why() == WorkEnded::Why::kTimeUp ? 400 : 499}};
  }
  const int nice = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)));
  return {.response = {.status = 200, .body = std::to_string(nice)}};
}

struct Asked {
  std::stop_source source;
  std::future<Reply> reply;
};

Asked ask(WorkLanes& lanes, const std::string& time, size_t body_bytes = 0) {
  HttpRequest request;
  request.body = time + " ";
  request.body.resize(std::max(request.body.size(), body_bytes), ' ');
  const auto promise = std::make_shared<std::promise<Reply>>();
  std::future<Reply> reply = promise->get_future();
  return {lanes.submit(std::move(request), {}, [promise](Reply r) { promise->set_value(std::move(r)); }),
          std::move(reply)};
}

const WorkLaneOptions kOptions{
    .threads = 1, .fast_body_bytes = 1000, .slice = 20ms, .slow_requests = 2, .timeout_s = 600};
constexpr size_t kLarge = 2000;

TEST(WorkLanes, SmallRequestsPassLargeOnesAndSlowOnes) {
  const std::string usual = std::to_string(::getpriority(PRIO_PROCESS, 0));
  std::atomic<int64_t> queued{0};
  WorkLanes lanes(spend, kOptions, queued);
  Asked large = ask(lanes, "forever", kLarge);
  Asked slow = ask(lanes, "forever");  // small, and takes longer than it says
  for (int i = 0; i < 20; ++i) {
    Asked small = ask(lanes, "1");
    ASSERT_EQ(small.reply.wait_for(60s), std::future_status::ready);
    EXPECT_EQ(small.reply.get().response.body, usual);
  }
  EXPECT_EQ(queued, 1);
  EXPECT_EQ(large.reply.wait_for(0s), std::future_status::timeout);
  large.source.request_stop();
  slow.source.request_stop();
}

TEST(WorkLanes, LargeOnesRunAtLowPriority) {
  std::atomic<int64_t> queued{0};
  WorkLanes lanes(spend, kOptions, queued);
  EXPECT_GT(std::stoi(ask(lanes, "1", kLarge).reply.get().response.body), 0);
  EXPECT_GT(std::stoi(ask(lanes, "60").reply.get().response.body), 0);  // begun again there
}

TEST(WorkLanes, AFullQueueIsAnsweredWith503) {
  std::atomic<int64_t> queued{0};
  WorkLanes lanes(spend, kOptions, queued);
  std::vector<Asked> asked;
  asked.push_back(ask(lanes, "forever", kLarge));
  while (queued > 0) std::this_thread::sleep_for(1ms);  // taken up
  asked.push_back(ask(lanes, "forever", kLarge));
  asked.push_back(ask(lanes, "forever", kLarge));
  EXPECT_EQ(queued, 2);
  Reply refused = ask(lanes, "1", kLarge).reply.get();
  EXPECT_EQ(refused.response.status, 503);
  ASSERT_FALSE(refused.response.headers.empty());
  EXPECT_EQ(refused.response.headers[0].first, "retry-after");
  // Whoever leaves makes room, also where nothing is taken up.
  asked[2].source.request_stop();
  asked.push_back(ask(lanes, "forever", kLarge));
  EXPECT_EQ(asked.back().reply.wait_for(100ms), std::future_status::timeout);
  EXPECT_EQ(queued, 2);
  for (Asked& a : asked) a.source.request_stop();
  EXPECT_EQ(ask(lanes, "1").reply.get().response.status, 200);
  while (queued > 0) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(ask(lanes, "1", kLarge).reply.get().response.status, 200);
}

TEST(WorkLanes, TimeIsUp) {
  std::atomic<int64_t> queued{0};
  WorkLaneOptions options = kOptions;
  options.timeout_s = 0.1;
  WorkLanes lanes(spend, options, queued);
  Asked first = ask(lanes, "forever", kLarge);
  Asked second = ask(lanes, "1", kLarge);  // waits as long as the first may take
  EXPECT_EQ(first.reply.get().response.status, 400);
  const int status = second.reply.get().response.status;
  EXPECT_TRUE(status == 200 || status == 503) << status;
}

TEST(WorkLanes, StopEndsWhatRunsAndWhatWaits) {
  std::atomic<int64_t> queued{0};
  WorkLanes lanes(spend, kOptions, queued);
  std::vector<Asked> asked;
  for (int i = 0; i < 3; ++i) asked.push_back(ask(lanes, "forever", kLarge));
  asked.push_back(ask(lanes, "forever"));
  lanes.stop();  // or it lasts forever
}

}  // namespace
}  // namespace millrace::server
