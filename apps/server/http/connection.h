// Connection: one client's socket, from accept to close, as one coroutine on its own strand: read a request,
// let the Api answer, write, repeat. No thread belongs to it.
//
//   back-pressure   events are taken from the engine only when what was taken before is written: a slow
//                   reader holds at most `pending_bytes` here, and is given up after write_timeout_s
//                   without progress
//   client gone     a read is always under way while an answer is, or the work for it: its end destroys the
//                   answer, which cancels, or stops the work
#pragma once

#include <array>
#include <boost/asio/awaitable.hpp>
#include <memory>
#include <optional>
#include <string>

#include "api.h"
#include "http/http_parser.h"
#include "http/transport.h"
#include "http/waiter.h"
#include "options.h"
#include "work_lanes.h"

namespace millrace::server {

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Api& api, WorkLanes& workers, boost::asio::any_io_executor strand,
             std::unique_ptr<Transport> transport, std::string remote, std::shared_ptr<void> share);
  ~Connection();

  boost::asio::awaitable<void> run();
  // From any thread: finish what is under way (drain) or stop at once.
  void stop(bool at_once);

 private:
  using Clock = Waiter::Clock;
  template <class T>
  using Awaitable = boost::asio::awaitable<T>;

  struct CountUp {  // for as long as it is there
    explicit CountUp(std::atomic<int64_t>& n) : number(n) { ++number; }
    ~CountUp() { --number; }
    CountUp(const CountUp&) = delete;
    CountUp& operator=(const CountUp&) = delete;
    std::atomic<int64_t>& number;
  };

  struct Held {  // bytes of a body, counted among all for as long as it is received
    explicit Held(std::atomic<int64_t>& n) : all(n) {}
    ~Held() { all -= mine; }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    void add(size_t bytes) {
      mine += static_cast<int64_t>(bytes);
      all += static_cast<int64_t>(bytes);
    }
    std::atomic<int64_t>& all;
    int64_t mine = 0;
  };
  static constexpr int64_t kSmallBody = 64 << 10;

  void start_read();
  Awaitable<bool> read_more(Clock::time_point deadline);  // false: gone, stopped or too late
  Awaitable<bool> write(std::string_view bytes);
  Awaitable<bool> read_head(HttpParser& parser);
  Awaitable<bool> read_body(HttpParser& parser);
  Awaitable<bool> answer_one(HttpParser& parser);  // true: the connection may be used again
  Awaitable<void> fail(const HttpParser& parser, const ApiError& error);
  Awaitable<std::optional<Reply>> handle(HttpRequest request, Client client);
  Awaitable<bool> send(const HttpRequest& request, const Client& client, HttpResponse response);
  Awaitable<bool> send_answer(const HttpRequest& request, const Client& client,
                              std::unique_ptr<Answer> answer);
  Awaitable<bool> send_events(const HttpRequest& request, const Client& client, Answer& answer,
                              std::string first, bool done);
  Awaitable<void> linger();
  std::string head_text(const HttpRequest& request, const Client& client, const HttpResponse& response,
                        bool keep_alive, bool chunked) const;
  void log(const HttpRequest& request, const Client& client, int status, Clock::time_point start,
           int64_t tokens, bool cut) const;
  bool stopping() const { return draining_ || at_once_; }

  Api& api_;
  WorkLanes& workers_;
  std::shared_ptr<Waiter> waiter_;
  std::unique_ptr<Transport> transport_;
  std::string remote_;
  std::shared_ptr<void> share_;  // of its address's connections

  std::string buffer_;  // read and not yet parsed
  std::array<char, 8192> incoming_;
  bool reading_ = false, gone_ = false;
  bool written_ = false, write_ok_ = false;
  size_t written_bytes_ = 0;
  bool draining_ = false, at_once_ = false;
};

}  // namespace millrace::server
