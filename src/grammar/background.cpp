#include "grammar/background.h"

#include <exception>
#include <utility>

namespace millrace::grammar {

Background::~Background() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    queue_.clear();
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Background::post(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    if (queue_.size() >= kMaxQueued) return;
    queue_.push_back(std::move(job));
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
}

void Background::wait_until_idle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
}

void Background::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ending_ || !queue_.empty(); });
    if (ending_) return;
    std::function<void()> job = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    try {
      job();
    } catch (const std::exception&) {
      // Whoever asks for the same does it again and gets the error.
    }
    job = nullptr;  // what it owned may take long to destroy: not under the lock
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace millrace::grammar
