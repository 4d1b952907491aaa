// How much one client may ask for: requests and tokens a minute, requests at the same time, the highest
// priority. A client is a key or, without keys, an address. Any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "http.h"

namespace millrace::server {

// Token buckets by name: a minute's worth may come at once, then at the rate.
class RateLimiter {
 public:
  using Clock = std::chrono::steady_clock;
  struct Verdict {
    bool allowed = true;
    double remaining = 0;  // left now
    double wait_s = 0;     // until it is allowed, when it is not
  };
  // Takes `cost` when it is there. More than a minute's worth is taken from a full bucket, which then owes
  // the rest.
  Verdict take(const std::string& who, double per_minute, double cost, Clock::time_point now = Clock::now());
  // Takes what was used already; the bucket may then owe.
  void charge(const std::string& who, double per_minute, double amount, Clock::time_point now = Clock::now());

 private:
  struct Bucket {
    double tokens, per_minute;
    Clock::time_point filled;
    void fill(Clock::time_point now);
  };
  Bucket& bucket_of(const std::string& who, double per_minute, Clock::time_point now);

  static constexpr size_t kMaxBuckets = 10000;
  std::mutex mutex_;
  std::unordered_map<std::string, Bucket> buckets_;
};

class ClientUse;

class ClientTable {
 public:
  struct Entry {
    std::shared_ptr<ClientUse> use = {};       // or
    std::optional<HttpResponse> refusal = {};  // 429
    Headers headers = {};                      // x-ratelimit-*
  };
  // Counts one request of `who`, for as long as what is returned lives.
  Entry enter(const std::string& who, const ClientLimits& limits);

 private:
  friend class ClientUse;
  // True: counted. A client with nothing under way may always begin something.
  bool begin(const std::string& who, int32_t limit, int32_t count);
  void end(const std::string& who, int32_t count);

  RateLimiter requests_, tokens_;
  std::mutex mutex_;
  std::unordered_map<std::string, int32_t> running_;
};

// What a client has under way with one request.
class ClientUse {
 public:
  ClientUse(ClientTable& table, std::string who, const ClientLimits& limits)
      : table_(table), who_(std::move(who)), limits_(limits) {}
  ~ClientUse() { table_.end(who_, count_); }
  ClientUse(const ClientUse&) = delete;
  ClientUse& operator=(const ClientUse&) = delete;

  // The request turns out to be several: counts the others, once. Each of `samples` answers to a prompt is
  // under way of its own; the rate is of prompts. Throws ApiError{429} when they are too many.
  void count_prompts(int32_t prompts, int32_t samples = 1);
  void charge_tokens(int64_t tokens);

  // Whose request the calling thread reads, so that no endpoint can forget to say: Generation asks.
  static std::shared_ptr<ClientUse> current();
  class Scope {
   public:
    explicit Scope(std::shared_ptr<ClientUse> use);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::shared_ptr<ClientUse> before_;
  };

 private:
  ClientTable& table_;
  const std::string who_;
  const ClientLimits limits_;
  int32_t count_ = 1;
};

// How many connections each address has.
class AddressCounts {
 public:
  explicit AddressCounts(int32_t most) : most_(most) {}
  // Something to hold while the connection lasts; nothing when the address has its share.
  std::shared_ptr<void> enter(const std::string& address);

 private:
  const int32_t most_;
  std::mutex mutex_;
  std::unordered_map<std::string, int32_t> counts_;
};

}  // namespace millrace::server
