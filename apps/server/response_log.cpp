#include "response_log.h"

#include <algorithm>

namespace millrace::server {

void ResponseLog::append(std::string event) {
  const std::lock_guard lock(mutex_);
  bytes_ += sizeof(event) + event.size();
  events_.push_back(std::move(event));
  tell();
}

void ResponseLog::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  tell();
}

size_t ResponseLog::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

bool ResponseLog::read(size_t& next, std::string& out, size_t max_bytes) const {
  const std::lock_guard lock(mutex_);
  while (next < events_.size() && out.size() < max_bytes) out += events_[next++];
  return ended_ && next >= events_.size();
}

uint64_t ResponseLog::follow(std::function<void()> notify) {
  const std::lock_guard lock(mutex_);
  notify();
  followers_.emplace(next_follower_, std::move(notify));
  return next_follower_++;
}

void ResponseLog::unfollow(uint64_t id) {
  const std::lock_guard lock(mutex_);
  followers_.erase(id);
}

void ResponseLog::tell() const {
  for (const auto& [id, notify] : followers_) notify();
}

}  // namespace millrace::server
