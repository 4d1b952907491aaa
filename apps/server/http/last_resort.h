// LastResort: ends the process at a time that was set, whatever its threads do. A thread that computes cannot
// be made to stop from outside, and nothing it uses may be taken from under it: what is left then is to leave
// with it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "log.h"

namespace millrace::server {

class LastResort {
 public:
  using Clock = std::chrono::steady_clock;
  explicit LastResort(const Log& log) : state_(std::make_shared<State>(log)) {}

  // In place of the time before. From any thread.
  void end_at(Clock::time_point when) {
    const std::lock_guard lock(state_->mutex);
    const bool first = !state_->when;
    state_->when = when;
    state_->changed.notify_one();
    // Detached: it outlasts its owner, and ends with the process, one way or the other.
    if (first) std::thread([state = state_] { state->wait(); }).detach();
  }

 private:
  struct State {
    explicit State(const Log& l) : log(l) {}
    void wait() {
      std::unique_lock lock(mutex);
      while (Clock::now() < *when) changed.wait_until(lock, *when);
      log.write("warn", "some threads are still busy: ending without them");
      std::_Exit(0);
    }
    const Log log;
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<Clock::time_point> when;
  };
  std::shared_ptr<State> state_;
};

}  // namespace millrace::server
