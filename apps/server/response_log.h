// ResponseLog: the events of one response, by number, while they come and after: whoever lost its connection
// reads on where it stopped, and any number may follow. ResponseLogAnswer is one who reads.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "http.h"

namespace millrace::server {

class ResponseLog {
 public:
  void append(std::string event);  // as it goes over the wire; its number is how many came before
  void end();                      // no more come
  size_t bytes() const;

  // Appends the events from `next` on to `out`, until it holds `max_bytes`, and moves `next` behind them.
  // True: those were the last.
  bool read(size_t& next, std::string& out, size_t max_bytes) const;
  // `notify` is called whenever something has come, and now, from any thread; until the id is given back.
  uint64_t follow(std::function<void()> notify);
  void unfollow(uint64_t id);

 private:
  void tell() const;  // with the mutex held

  mutable std::mutex mutex_;
  std::vector<std::string> events_;
  size_t bytes_ = 0;
  bool ended_ = false;
  uint64_t next_follower_ = 1;
  std::map<uint64_t, std::function<void()>> followers_;
};

class ResponseLogAnswer final : public Answer {
 public:
  // first: the number of the first event that is wanted.
  ResponseLogAnswer(std::shared_ptr<ResponseLog> log, size_t first, Headers headers = {})
      : log_(std::move(log)), next_(first), headers_(std::move(headers)) {}
  ~ResponseLogAnswer() override { log_->unfollow(follower_); }

  bool streaming() const override { return true; }
  void on_ready(std::function<void()> notify) override { follower_ = log_->follow(std::move(notify)); }
  bool advance(std::string& out, size_t max_bytes) override { return log_->read(next_, out, max_bytes); }
  std::optional<HttpResponse> response() override { return std::nullopt; }
  Headers headers() const override { return headers_; }

 private:
  const std::shared_ptr<ResponseLog> log_;
  size_t next_;
  const Headers headers_;
  uint64_t follower_ = 0;
};

}  // namespace millrace::server
