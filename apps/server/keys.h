// API keys from a file, and how often each may ask.
//
// The file has a key per line, or a name and a key separated by white space; # begins a comment. Names appear
// in logs, keys never do. It is read again on SIGHUP.
#pragma once

#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace millrace::server {

// As long for a wrong key as for a right one: only the length of `given` shows.
bool constant_time_equal(std::string_view given, std::string_view expected);

class Keys {
 public:
  Keys() = default;
  // Throws Error{kBadInput} for a file without a key or with a line of more than two words.
  static Keys from_file(const std::string& path);
  static Keys from_text(std::string_view text, const std::string& source);

  bool in_use() const { return !keys_.empty(); }
  size_t size() const { return keys_.size(); }
  // The name of the key in "Bearer KEY"; nothing when there is no such key.
  std::optional<std::string> check(std::string_view authorization) const;

 private:
  struct Key {
    std::string name, secret;
  };
  std::vector<Key> keys_;
};

// Token buckets by name: a minute's requests may come at once, then at the rate. Any thread.
class RateLimiter {
 public:
  using Clock = std::chrono::steady_clock;
  explicit RateLimiter(double per_minute) : per_minute_(per_minute) {}

  struct Verdict {
    bool allowed = true;
    double remaining = 0;  // requests left now
    double wait_s = 0;     // until the next is allowed, when this one is not
  };
  Verdict take(const std::string& who, Clock::time_point now = Clock::now());
  double per_minute() const { return per_minute_; }

 private:
  struct Bucket {
    double tokens;
    Clock::time_point filled;
  };
  void forget_full(Clock::time_point now);

  static constexpr size_t kMaxBuckets = 10000;
  double per_minute_;
  std::mutex mutex_;
  std::unordered_map<std::string, Bucket> buckets_;
};

}  // namespace millrace::server
