#include "client_limits.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "addresses.h"
#include "api_error.h"

namespace millrace::server {
namespace {

thread_local std::shared_ptr<ClientUse> current_use;

ApiError too_many(const std::string& what, double wait_s) {
  ApiError error(429, fmt::format("{}: try again in {:.1f} s", what, wait_s), "", "rate_limit_exceeded");
  error.retry_after_s = std::max(1, static_cast<int>(std::ceil(std::min(wait_s, 1e6))));
  return error;
}

// OpenAI's names for what is left.
void add_rate_headers(Headers& headers, std::string_view what, double per_minute,
                      const RateLimiter::Verdict& verdict) {
  const double left = std::max(0.0, std::floor(verdict.remaining));
  const double full_s = (std::max(1.0, per_minute) - verdict.remaining) * 60 / per_minute;
  headers.emplace_back(fmt::format("x-ratelimit-limit-{}", what), fmt::format("{:.10g}", per_minute));
  headers.emplace_back(fmt::format("x-ratelimit-remaining-{}", what), fmt::format("{:.10g}", left));
  headers.emplace_back(fmt::format("x-ratelimit-reset-{}", what), fmt::format("{:.1f}s", full_s));
}

}  // namespace

// ---------------------------------------------------------------- rates

void RateLimiter::Bucket::fill(Clock::time_point now) {
  const double elapsed = std::chrono::duration<double>(now - filled).count();
  tokens = std::min(std::max(1.0, per_minute), tokens + elapsed * per_minute / 60);
  filled = now;
}

RateLimiter::Bucket& RateLimiter::bucket_of(const std::string& who, double per_minute,
                                            Clock::time_point now) {
  if (buckets_.size() >= kMaxBuckets && !buckets_.contains(who)) {
    // A bucket that is full again says nothing. When none is, the table starts over: better than to grow
    // forever.
    std::erase_if(buckets_, [&](const auto& item) {
      Bucket bucket = item.second;
      bucket.fill(now);
      return bucket.tokens >= std::max(1.0, bucket.per_minute);
    });
    if (buckets_.size() >= kMaxBuckets) buckets_.clear();
  }
  Bucket& bucket =
      buckets_.try_emplace(who, Bucket{std::max(1.0, per_minute), per_minute, now}).first->second;
  bucket.per_minute = per_minute;  // of a key whose line has changed
  bucket.fill(now);
  return bucket;
}

RateLimiter::Verdict RateLimiter::take(const std::string& who, double per_minute, double cost,
                                       Clock::time_point now) {
  if (per_minute <= 0) return {};
  const std::lock_guard lock(mutex_);
  Bucket& bucket = bucket_of(who, per_minute, now);
  const double needed = std::min(cost, std::max(1.0, per_minute));
  Verdict verdict;
  verdict.allowed = bucket.tokens >= needed;
  if (verdict.allowed) {
    bucket.tokens -= cost;
  } else {
    verdict.wait_s = (needed - bucket.tokens) * 60 / per_minute;
  }
  verdict.remaining = bucket.tokens;
  return verdict;
}

void RateLimiter::charge(const std::string& who, double per_minute, double amount, Clock::time_point now) {
  if (per_minute <= 0) return;
  const std::lock_guard lock(mutex_);
  bucket_of(who, per_minute, now).tokens -= amount;
}

// ---------------------------------------------------------------- requests

bool ClientTable::begin(const std::string& who, int32_t limit, int32_t count) {
  const std::lock_guard lock(mutex_);
  int32_t& running = running_[who];
  if (limit > 0 && running > 0 && running + count > limit) return false;
  running += count;
  return true;
}

void ClientTable::end(const std::string& who, int32_t count) {
  const std::lock_guard lock(mutex_);
  const auto found = running_.find(who);
  if (found != running_.end() && (found->second -= count) <= 0) running_.erase(found);
}

ClientTable::Entry ClientTable::enter(const std::string& who, const ClientLimits& limits) {
  Entry entry;
  const auto refuse = [&](const std::string& what, double wait_s) {
    entry.refusal = error_response(too_many(what, wait_s));
    for (const auto& header : entry.headers) entry.refusal->headers.push_back(header);
  };
  // What is used up already first, so that a refused request costs nothing.
  const RateLimiter::Verdict tokens = tokens_.take(who, limits.tokens_per_minute, 0);
  if (limits.tokens_per_minute > 0) {
    add_rate_headers(entry.headers, "tokens", limits.tokens_per_minute, tokens);
    if (!tokens.allowed) {
      refuse(fmt::format("more than {} tokens a minute", limits.tokens_per_minute), tokens.wait_s);
      return entry;
    }
  }
  if (!begin(who, limits.running, 1)) {
    refuse(fmt::format("more than {} requests at the same time", limits.running), 1);
    return entry;
  }
  entry.use = std::make_shared<ClientUse>(*this, who, limits);
  const RateLimiter::Verdict requests = requests_.take(who, limits.requests_per_minute, 1);
  if (limits.requests_per_minute > 0) {
    add_rate_headers(entry.headers, "requests", limits.requests_per_minute, requests);
    if (!requests.allowed) {
      entry.use.reset();
      refuse(fmt::format("more than {} requests a minute", limits.requests_per_minute), requests.wait_s);
    }
  }
  return entry;
}

void ClientUse::count_prompts(int32_t prompts, int32_t samples) {
  const int32_t answers = prompts * samples;
  if (answers <= count_) return;
  // The one it was let in for is already counted; with nothing else under way all of its answers may run.
  table_.end(who_, count_);
  const bool begun = table_.begin(who_, limits_.running, answers);
  if (!begun) {
    table_.begin(who_, 0, count_);
    throw too_many(fmt::format("{} {}, and more than {} at the same time", answers,
                               samples == 1 ? "prompts" : "answers", limits_.running),
                   1);
  }
  count_ = answers;
  if (prompts == 1) return;
  table_.requests_.charge(who_, limits_.requests_per_minute, -1);  // back, and then all at once
  const RateLimiter::Verdict verdict = table_.requests_.take(who_, limits_.requests_per_minute, prompts);
  if (!verdict.allowed) {
    throw too_many(fmt::format("{} prompts, each a request, and more than {} requests a minute", prompts,
                               limits_.requests_per_minute),
                   verdict.wait_s);
  }
}

void ClientUse::charge_tokens(int64_t tokens) {
  if (tokens > 0) table_.tokens_.charge(who_, limits_.tokens_per_minute, static_cast<double>(tokens));
}

std::shared_ptr<ClientUse> ClientUse::current() { return current_use; }
ClientUse::Scope::Scope(std::shared_ptr<ClientUse> use)
    : before_(std::exchange(current_use, std::move(use))) {}
ClientUse::Scope::~Scope() { current_use = std::move(before_); }

// ---------------------------------------------------------------- connections

std::shared_ptr<void> AddressCounts::enter(const std::string& address) {
  const std::string group = address_group(address);
  const std::lock_guard lock(mutex_);
  int32_t& count = counts_[group];
  if (count >= most_) return nullptr;
  ++count;
  return {this, [group](AddressCounts* self) {
            const std::lock_guard unlock(self->mutex_);
            const auto found = self->counts_.find(group);
            if (found != self->counts_.end() && --found->second <= 0) self->counts_.erase(found);
          }};
}

}  // namespace millrace::server
