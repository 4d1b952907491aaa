// WorkLanes: the threads that read requests. Everybody starts on the fast lane, where nobody may take more
// than a slice of a thread's time; who needs more, or comes with a large body, goes on on the slow lane: few
// threads of low priority, a queue with an end, and a limit in time. So a small request never waits for a
// large one.
//
//   fast   `threads`, any number queued; a request that has used its slice begins again on the slow lane
//   slow   `slow_threads`, at most `slow_requests` and `slow_bytes` queued: more are answered 503
//          with Retry-After
//
// What is queued or under way ends when its client leaves (the stop source) or the server ends (stop).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

#include "base/work_budget.h"
#include "http.h"

namespace millrace::server {

struct WorkLaneOptions {
  int threads = 2;
  int slow_threads = 1;
  size_t fast_body_bytes = 64 << 10;  // larger ones go to the slow lane at once
  std::chrono::milliseconds slice{10};
  size_t slow_requests = 64;
  size_t slow_bytes = size_t{256} << 20;  // of the bodies that wait
  double timeout_s = 10;                  // of a request's work, and of its waiting for a slow thread
};

class WorkLanes {
 public:
  // Must not throw. A reply with `unfinished` set: the slice of these limits was used up.
  using Handler = std::function<Reply(const HttpRequest&, const Client&, const WorkLimits&)>;
  using Done = std::function<void(Reply)>;

  // Keeps in `queued` how many wait for the slow lane.
  WorkLanes(Handler handler, WorkLaneOptions options, std::atomic<int64_t>& queued);
  ~WorkLanes() { stop(); }
  WorkLanes(const WorkLanes&) = delete;
  WorkLanes& operator=(const WorkLanes&) = delete;

  // `done` is called once, from any thread, and must return soon; it is not called for what is stopped
  // before.
  std::stop_source submit(HttpRequest request, Client client, Done done);
  // Runs something else on a slow thread, however many wait for one.
  void post(std::function<void()> work);
  // Stops what is queued and under way, and waits for the threads to end. From one thread, once or more.
  void stop();

 private:
  struct Job {
    HttpRequest request = {};
    Client client = {};
    Done done = {};
    std::function<void()> other = {};  // in place of a request
    std::stop_source source = {};
    std::chrono::steady_clock::time_point queued = {};
  };
  using JobPtr = std::shared_ptr<Job>;
  struct Lane {
    std::mutex mutex = {};
    std::condition_variable changed = {};
    std::deque<JobPtr> queue = {};
    std::vector<JobPtr> running = {};
    size_t bytes = 0;  // of the queue's bodies
    bool ending = false;
    std::vector<std::thread> threads = {};
  };

  void run(Lane& lane, bool is_slow);
  void work_fast(const JobPtr& job);
  void work_slow(const JobPtr& job);
  void queue_slow(JobPtr job);
  JobPtr next(Lane& lane);

  const Handler handler_;
  const WorkLaneOptions options_;
  std::atomic<int64_t>& queued_;
  Lane fast_, slow_;
};

}  // namespace millrace::server
