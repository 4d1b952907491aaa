// Background: one thread that does what can be done ahead. It starts with the first job, so who never posts
// has none. Work here is never needed, only done earlier: what does not fit in the queue is dropped, what
// fails fails again for whoever really asks.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace millrace::grammar {

class Background {
 public:
  Background() = default;
  ~Background();  // waits for the job under way and drops the others
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  void post(std::function<void()> job);
  void wait_until_idle();

 private:
  static constexpr size_t kMaxQueued = 256;
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false, ending_ = false;
  std::thread thread_;
};

}  // namespace millrace::grammar
