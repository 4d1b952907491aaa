// Waiter: how a coroutine sleeps until something happens or a time has come. Everything that may happen to a
// connection (bytes, a finished write, a token from the engine, the end of the server) sets its own flag and
// wakes; the coroutine looks at the flags. One place to wait means no race between several.
#pragma once

#include <atomic>
#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <memory>

namespace millrace::server {

class Waiter : public std::enable_shared_from_this<Waiter> {
 public:
  using Clock = std::chrono::steady_clock;
  explicit Waiter(boost::asio::any_io_executor executor)
      : executor_(std::move(executor)), timer_(executor_) {}

  const boost::asio::any_io_executor& executor() const { return executor_; }

  // On the executor.
  void wake() {
    woken_ = true;
    timer_.cancel();
  }
  // From any thread; many calls before the coroutine runs are one.
  void wake_from_elsewhere() {
    if (posted_.exchange(true)) return;
    boost::asio::post(executor_, [self = shared_from_this()] {
      self->posted_ = false;
      self->wake();
    });
  }
  // False when `deadline` came first.
  boost::asio::awaitable<bool> until(Clock::time_point deadline) {
    if (!woken_) {
      timer_.expires_at(deadline);
      boost::system::error_code ignored;
      co_await timer_.async_wait(boost::asio::redirect_error(boost::asio::use_awaitable, ignored));
    }
    co_return std::exchange(woken_, false);
  }

 private:
  boost::asio::any_io_executor executor_;
  boost::asio::steady_timer timer_;
  bool woken_ = false;
  std::atomic<bool> posted_{false};
};

}  // namespace millrace::server
