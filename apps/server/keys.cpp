#include "keys.h"

#include <algorithm>

#include "base/error.h"
#include "base/mapped_file.h"

namespace millrace::server {

bool constant_time_equal(std::string_view given, std::string_view expected) {
  if (expected.empty()) return false;
  unsigned char differs = given.size() == expected.size() ? 0 : 1;
  size_t j = 0;
  for (const char c : given) {
    differs = static_cast<unsigned char>(differs | (c ^ expected[j]));
    j = j + 1 == expected.size() ? 0 : j + 1;
  }
  // The compiler must not see that it could stop early.
  volatile unsigned char result = differs;
  return result == 0;
}

Keys Keys::from_file(const std::string& path) { return from_text(read_text_file(path), path); }

Keys Keys::from_text(std::string_view text, const std::string& source) {
  Keys keys;
  int line_number = 0;
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    ++line_number;
    line = line.substr(0, line.find('#'));
    std::vector<std::string> words;
    constexpr std::string_view kSpace = " \t\r";
    size_t begin = 0;
    while ((begin = line.find_first_not_of(kSpace, begin)) != std::string_view::npos) {
      const size_t end = std::min(line.find_first_of(kSpace, begin), line.size());
      words.emplace_back(line.substr(begin, end - begin));
      begin = end;
    }
    if (words.empty()) continue;
    if (words.size() > 2) {
      throw_error(ErrorCode::kBadInput, "{}: line {}: found {} words, expected KEY or NAME KEY", source,
                  line_number, words.size());
    }
    std::string name = words.size() == 2 ? words[0] : fmt::format("key-{}", keys.keys_.size() + 1);
    keys.keys_.push_back({.name = std::move(name), .secret = words.back()});
  }
  if (keys.keys_.empty())
    throw_error(ErrorCode::kBadInput, "{}: found no key, expected at least one", source);
  return keys;
}

std::optional<std::string> Keys::check(std::string_view authorization) const {
  constexpr std::string_view kScheme = "bearer ";
  if (authorization.size() < kScheme.size()) return std::nullopt;
  for (size_t i = 0; i < kScheme.size(); ++i) {
    const char c = authorization[i];
    if ((c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c) != kScheme[i]) return std::nullopt;
  }
  authorization.remove_prefix(kScheme.size());
  const Key* found = nullptr;
  for (const Key& key : keys_) {  // all of them, always
    if (constant_time_equal(authorization, key.secret)) found = &key;
  }
  return found == nullptr ? std::nullopt : std::optional(found->name);
}

RateLimiter::Verdict RateLimiter::take(const std::string& who, Clock::time_point now) {
  if (per_minute_ <= 0) return {};
  const double burst = std::max(1.0, per_minute_);
  const std::lock_guard lock(mutex_);
  if (buckets_.size() >= kMaxBuckets && !buckets_.contains(who)) forget_full(now);
  Bucket& bucket = buckets_.try_emplace(who, Bucket{burst, now}).first->second;
  const double elapsed = std::chrono::duration<double>(now - bucket.filled).count();
  bucket.tokens = std::min(burst, bucket.tokens + elapsed * per_minute_ / 60);
  bucket.filled = now;
  Verdict verdict;
  verdict.allowed = bucket.tokens >= 1;
  if (verdict.allowed) {
    bucket.tokens -= 1;
  } else {
    verdict.wait_s = (1 - bucket.tokens) * 60 / per_minute_;
  }
  verdict.remaining = bucket.tokens;
  return verdict;
}

// A bucket that is full again says nothing. When none is, the table starts over: better than to grow forever.
void RateLimiter::forget_full(Clock::time_point now) {
  std::erase_if(buckets_, [&](const auto& item) {
    const double elapsed = std::chrono::duration<double>(now - item.second.filled).count();
    return item.second.tokens + elapsed * per_minute_ / 60 >= std::max(1.0, per_minute_);
  });
  if (buckets_.size() >= kMaxBuckets) buckets_.clear();
}

}  // namespace millrace::server
