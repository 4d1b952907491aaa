#include "http/connection.h"

#include <fmt/core.h>

#include "anthropic_error.h"
#include "api_error.h"
#include "ids.h"

namespace millrace::server {
namespace {

namespace asio = boost::asio;

Waiter::Clock::time_point after(double seconds) {
  return Waiter::Clock::now() +
         std::chrono::duration_cast<Waiter::Clock::duration>(std::chrono::duration<double>(seconds));
}

constexpr size_t kMaxPipelined = 64 << 10;  // of the requests behind one that is being answered

void append_chunk(std::string& out, std::string_view data) {
  out += fmt::format("{:x}\r\n", data.size());
  out += data;
  out += "\r\n";
}

}  // namespace

Connection::Connection(Api& api, WorkLanes& workers, asio::any_io_executor strand,
                       std::unique_ptr<Transport> transport, std::string remote, std::shared_ptr<void> share)
    : api_(api),
      workers_(workers),
      waiter_(std::make_shared<Waiter>(std::move(strand))),
      transport_(std::move(transport)),
      remote_(std::move(remote)),
      share_(std::move(share)) {
  ++api_.counters().connections;
}

Connection::~Connection() { --api_.counters().connections; }

void Connection::stop(bool at_once) {
  asio::post(waiter_->executor(), [self = shared_from_this(), at_once] {
    self->draining_ = true;
    self->at_once_ = self->at_once_ || at_once;
    if (at_once) self->transport_->close();
    self->waiter_->wake();
  });
}

// ---------------------------------------------------------------- bytes

void Connection::start_read() {
  if (reading_ || gone_) return;
  reading_ = true;
  transport_->read_some(incoming_.data(), incoming_.size(), [self = shared_from_this()](bool ok, size_t n) {
    self->reading_ = false;
    if (ok && n > 0) {
      self->buffer_.append(self->incoming_.data(), n);
    } else {
      self->gone_ = true;
    }
    self->waiter_->wake();
  });
}

Connection::Awaitable<bool> Connection::read_more(Clock::time_point deadline) {
  const size_t before = buffer_.size();
  start_read();
  while (buffer_.size() == before) {
    if (gone_ || at_once_) co_return false;
    if (draining_ && buffer_.empty()) co_return false;  // between requests
    if (!co_await waiter_->until(deadline)) co_return false;
  }
  co_return true;
}

Connection::Awaitable<bool> Connection::write(std::string_view bytes) {
  while (!bytes.empty()) {
    written_ = false;
    transport_->write_some(bytes.data(), bytes.size(), [self = shared_from_this()](bool ok, size_t n) {
      self->written_ = true;
      self->write_ok_ = ok;
      self->written_bytes_ = n;
      self->waiter_->wake();
    });
    const Clock::time_point deadline = after(api_.options().write_timeout_s);
    bool given_up = false;
    while (!written_) {
      const bool in_time = co_await waiter_->until(given_up ? after(1) : deadline);
      if (written_ || (in_time && !gone_ && !at_once_)) continue;
      // The bytes belong to the write until it has ended: closing makes it end.
      if (!given_up) transport_->close();
      given_up = true;
    }
    if (!write_ok_ || given_up) {
      gone_ = true;
      co_return false;
    }
    bytes.remove_prefix(written_bytes_);
  }
  co_return true;
}

// So that the client reads our last words before the connection breaks on what it still sends.
Connection::Awaitable<void> Connection::linger() {
  transport_->shutdown_send();
  const Clock::time_point deadline = after(1);
  size_t taken = 0;
  constexpr size_t kMaxBytes = 1 << 20;
  while (taken < kMaxBytes) {
    taken += buffer_.size();
    buffer_.clear();
    if (!co_await read_more(deadline)) break;
  }
}

// ---------------------------------------------------------------- requests

Connection::Awaitable<void> Connection::run() {
  bool shaken = false, ok = false;
  transport_->handshake([self = shared_from_this(), &shaken, &ok](bool good, size_t) {
    shaken = true;
    ok = good;
    self->waiter_->wake();
  });
  const Clock::time_point deadline = after(api_.options().header_timeout_s);
  bool closed = false;
  while (!shaken) {
    if (!co_await waiter_->until(closed ? after(1) : deadline) && !closed) {
      transport_->close();
      closed = true;
    }
  }
  while (ok) {
    HttpParser parser({.header_bytes = api_.options().header_bytes, .body_bytes = api_.options().body_bytes});
    if (!co_await read_head(parser)) break;
    ok = co_await answer_one(parser);
  }
  transport_->close();
}

Connection::Awaitable<bool> Connection::read_head(HttpParser& parser) {
  Clock::time_point deadline =
      after(buffer_.empty() ? api_.options().idle_timeout_s : api_.options().header_timeout_s);
  bool begun = !buffer_.empty();
  while (true) {
    if (!buffer_.empty()) {
      if (!begun) deadline = after(api_.options().header_timeout_s);
      begun = true;
      buffer_.erase(0, parser.feed(buffer_));
    }
    if (parser.state() == HttpParser::State::kFailed) {
      const ApiError error(parser.error_status(), parser.error_message(), "", "invalid_http");
      co_await fail(parser, error);
      co_return false;
    }
    if (parser.state() != HttpParser::State::kHeader) co_return true;
    if (!co_await read_more(deadline)) co_return false;
  }
}

// What many clients send at once must not be more than the server has memory for. Small bodies are always
// taken: a flood of large ones is refused at its own expense.
Connection::Awaitable<bool> Connection::read_body(HttpParser& parser) {
  Clock::time_point deadline = after(api_.options().header_timeout_s);
  Held held{api_.counters().body_bytes};
  while (parser.state() == HttpParser::State::kBody) {
    if (!buffer_.empty()) {
      const size_t taken = parser.feed(buffer_);
      buffer_.erase(0, taken);
      held.add(taken);
      if (parser.state() != HttpParser::State::kBody) break;
      if (held.mine > kSmallBody && held.all >= static_cast<int64_t>(api_.options().body_memory_mib << 20)) {
        ApiError busy(503, "too much is being received at the same time; see --body-memory", "", "busy");
        busy.retry_after_s = 1;
        co_await fail(parser, busy);
        co_return false;
      }
      // A large body may take long as a whole; a trickle may not.
      if (taken >= incoming_.size() / 2) deadline = after(api_.options().header_timeout_s);
    }
    if (!co_await read_more(deadline)) co_return false;
  }
  if (parser.state() == HttpParser::State::kFailed) {
    const ApiError error(parser.error_status(), parser.error_message(), "", "invalid_http");
    co_await fail(parser, error);
    co_return false;
  }
  co_return true;
}

Connection::Awaitable<void> Connection::fail(const HttpParser& parser, const ApiError& error) {
  HttpRequest request = parser.head();
  request.keep_alive = false;
  Client client;
  client.request_id = new_id("req-", 24);
  client.remote = remote_;
  // A variable of its own: g++ 12 destroys an aggregate that is made inside a co_await twice.
  HttpResponse response = error_response(error);
  const bool sent = co_await send(request, client, std::move(response));
  if (sent) co_await linger();
  log(request, client, error.status, Clock::now(), 0, false);
}

Connection::Awaitable<bool> Connection::answer_one(HttpParser& parser) {
  const Clock::time_point start = Clock::now();
  Client client = describe_client(parser.head(), remote_);
  if (std::optional<HttpResponse> refusal = api_.admit(parser.head(), client)) {
    HttpRequest head = parser.head();
    // The body was not read: what follows on this connection would be it.
    const bool unread = parser.state() != HttpParser::State::kDone;
    if (unread) head.keep_alive = false;
    const int status = refusal->status;
    const bool sent = co_await send(head, client, *std::move(refusal));
    log(head, client, status, start, 0, !sent);
    if (sent && unread) co_await linger();
    co_return sent&& head.keep_alive && !stopping();
  }
  if (parser.state() == HttpParser::State::kBody && parser.head().expects_continue && buffer_.empty()) {
    if (!co_await write("HTTP/1.1 100 Continue\r\n\r\n")) co_return false;
  }
  if (!co_await read_body(parser)) co_return false;
  HttpRequest request = parser.take();
  if (stopping()) request.keep_alive = false;
  const HttpRequest head{.method = request.method,
                         .target = request.target,
                         .path = request.path,
                         .query = {},
                         .headers = request.headers,
                         .body = {},
                         .version = request.version,
                         .keep_alive = request.keep_alive,
                         .expects_continue = false,
                         .has_body = false};
  std::optional<Reply> reply = co_await handle(std::move(request), client);
  if (!reply) {
    log(head, client, 499, start, 0, true);
    co_return false;
  }
  if (reply->answer) co_return co_await send_answer(head, client, std::move(reply->answer));
  const int status = reply->response.status;
  const bool sent = co_await send(head, client, std::move(reply->response));
  log(head, client, status, start, 0, !sent);
  co_return sent&& head.keep_alive && !stopping();
}

// Reading and tokenizing a request may take long: not on the threads that everybody's bytes go through.
// Nothing when the client left, or the server ends, before there is a reply: the work for it is stopped.
Connection::Awaitable<std::optional<Reply>> Connection::handle(HttpRequest request, Client client) {
  if (request.body.empty()) co_return api_.handle(request, client);
  struct Result {
    Reply reply;
    std::atomic<bool> there{false};
  };
  const auto result = std::make_shared<Result>();
  std::stop_source work =
      workers_.submit(std::move(request), std::move(client), [result, waiter = waiter_](Reply reply) {
        result->reply = std::move(reply);
        result->there = true;
        waiter->wake_from_elsewhere();
      });
  while (!result->there) {
    if (buffer_.size() < kMaxPipelined) start_read();
    co_await waiter_->until(after(3600));
    if (!gone_ && !at_once_) continue;
    work.request_stop();
    co_return std::nullopt;
  }
  co_return std::move(result->reply);
}

// ---------------------------------------------------------------- responses

std::string Connection::head_text(const HttpRequest& request, const Client& client,
                                  const HttpResponse& response, bool keep_alive, bool chunked) const {
  std::string out = fmt::format("HTTP/1.1 {} {}\r\n", response.status, reason_phrase(response.status));
  const auto add = [&](std::string_view name, std::string_view value) {
    out += fmt::format("{}: {}\r\n", name, value);
  };
  if (!response.content_type.empty()) add("content-type", response.content_type);
  for (const auto& [name, value] : response.headers) add(name, value);
  for (const auto& [name, value] : client.headers) add(name, value);
  add("x-request-id", client.request_id);
  if (is_anthropic_path(request.path)) add("request-id", client.request_id);
  if (!client.traceparent.empty()) add("traceparent", client.traceparent);
  if (chunked) {
    add("transfer-encoding", "chunked");
  } else if (response.status != 204 && response.status != 304) {
    add("content-length", std::to_string(response.body.size()));
  }
  if (!keep_alive) {
    add("connection", "close");
  } else if (request.version == 10) {
    add("connection", "keep-alive");
  }
  out += "\r\n";
  return out;
}

Connection::Awaitable<bool> Connection::send(const HttpRequest& request, const Client& client,
                                             HttpResponse response) {
  api_.add_headers(response, request);
  api_.counters().count(response.status);
  std::string out = head_text(request, client, response, request.keep_alive && !stopping(), false);
  if (request.method != "HEAD") out += response.body;
  co_return co_await write(out);
}

Connection::Awaitable<bool> Connection::send_answer(const HttpRequest& request, const Client& client,
                                                    std::unique_ptr<Answer> answer) {
  const CountUp count(api_.counters().streams);
  const Clock::time_point start = Clock::now();
  answer->on_ready([waiter = waiter_] { waiter->wake_from_elsewhere(); });
  std::string out;
  bool done = answer->advance(out, api_.options().pending_bytes);
  start_read();  // its end is how we know that the client has gone
  const Clock::time_point patience = after(api_.options().keep_alive_s);
  // The wait is a statement of its own: in a condition g++ 12 may wait whatever stands before it, and take
  // the wake-up of those that do not.
  while (answer->undecided() && !gone_ && !at_once_) {
    const bool woken = co_await waiter_->until(patience);
    if (!woken) break;
    done = answer->advance(out, api_.options().pending_bytes);
    start_read();
  }
  if (answer->streaming() && !answer->response()) {
    const bool sent = co_await send_events(request, client, *answer, std::move(out), done);
    log(request, client, 200, start, answer->generated_tokens(), !sent);
    co_return sent&& request.keep_alive&& request.version >= 11 && !stopping();
  }
  while (!done && !gone_ && !at_once_) {
    co_await waiter_->until(after(3600));
    done = answer->advance(out, api_.options().pending_bytes);
  }
  if (!done) {
    log(request, client, 499, start, answer->generated_tokens(), true);
    co_return false;
  }
  std::optional<HttpResponse> response = answer->response();
  const int64_t tokens = answer->generated_tokens();
  answer.reset();
  const int status = response->status;
  const bool sent = co_await send(request, client, *std::move(response));
  log(request, client, status, start, tokens, !sent);
  co_return sent&& request.keep_alive && !stopping();
}

Connection::Awaitable<bool> Connection::send_events(const HttpRequest& request, const Client& client,
                                                    Answer& answer, std::string first, bool done) {
  const bool chunked = request.version >= 11;
  HttpResponse head{.content_type = std::string(answer.content_type())};
  head.headers = {{"cache-control", "no-cache"}, {"x-accel-buffering", "no"}};
  for (auto& header : answer.headers()) head.headers.push_back(std::move(header));
  api_.add_headers(head, request);
  api_.counters().count(200);
  std::string out = head_text(request, client, head, request.keep_alive && chunked, chunked);
  std::string events = std::move(first);
  while (true) {
    if (!events.empty()) {
      if (chunked) {
        append_chunk(out, events);
      } else {
        out += events;
      }
      events.clear();
    }
    if (done && chunked) out += "0\r\n\r\n";
    if (!out.empty() && !co_await write(out)) co_return false;
    out.clear();
    if (done) co_return true;
    start_read();
    if (gone_ || at_once_) co_return false;
    done = answer.advance(events, api_.options().pending_bytes);
    if (!events.empty() || done) continue;
    if (!co_await waiter_->until(after(api_.options().keep_alive_s))) events = answer.keep_alive();
    if (buffer_.size() > kMaxPipelined) co_return false;  // whoever sends that much instead of reading
  }
}

void Connection::log(const HttpRequest& request, const Client& client, int status, Clock::time_point start,
                     int64_t tokens, bool cut) const {
  if (!api_.options().log_requests) return;
  std::vector<Log::Field> fields = {
      {"request_id", client.request_id},
      {"method", request.method},
      {"path", request.path},
      {"status", static_cast<double>(status)},
      {"seconds", std::chrono::duration<double>(Clock::now() - start).count()},
      {"remote", client.remote},
      {"key", client.key_name},
      {"traceparent", client.traceparent},
  };
  if (tokens > 0) fields.emplace_back("tokens", static_cast<double>(tokens));
  if (cut) fields.emplace_back("cut", "client gone");
  api_.log().write(status >= 500 ? "error" : "info", "request", fields);
}

}  // namespace millrace::server
