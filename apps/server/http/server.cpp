// The listener, the signals and the end: everything that is not one client's.
#include "server.h"

#include <sys/prctl.h>
#include <sys/resource.h>

#include <array>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/strand.hpp>
#include <csignal>
#include <filesystem>
#include <iterator>
#include <list>
#include <thread>
#include <utility>

#include "addresses.h"
#include "api_error.h"
#include "base/error.h"
#include "client_limits.h"
#include "heap.h"
#include "http/connection.h"
#include "http/last_resort.h"

namespace millrace::server {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
template <class T>
using Awaitable = asio::awaitable<T>;

std::chrono::steady_clock::duration seconds(double s) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(s));
}

// Each connection is a file to the system, and its usual limit is 1,024. Returns the limit, as high as it
// goes.
rlim_t raise_file_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return RLIM_INFINITY;
  const rlim_t before = limit.rlim_cur;
  limit.rlim_cur = limit.rlim_max;
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_max : before;
}

// So many connections leave files for all the rest: the cache's, those opened while running, and the sockets
// of those who are refused, who would otherwise wait for an answer that nobody can give.
int connections_within(rlim_t files, int wanted) {
  constexpr rlim_t kReserve = 32;
  std::error_code ignored;
  const std::filesystem::directory_iterator open_files("/proc/self/fd", ignored);
  const rlim_t taken = kReserve + static_cast<rlim_t>(std::distance(begin(open_files), end(open_files)));
  const rlim_t available = files > taken ? files - taken : 1;
  return available < static_cast<rlim_t>(wanted) ? static_cast<int>(available) : wanted;
}

// What is started meanwhile inherits the name, which tells the threads of this folder from the engine's (top
// -H).
class ThreadName {
 public:
  explicit ThreadName(const char* name) {
    ::prctl(PR_GET_NAME, before_.data());
    ::prctl(PR_SET_NAME, name);
  }
  ~ThreadName() { ::prctl(PR_SET_NAME, before_.data()); }
  ThreadName(const ThreadName&) = delete;
  ThreadName& operator=(const ThreadName&) = delete;

 private:
  std::array<char, 16> before_{};
};

// How long each step of the end may take beyond --drain-timeout: answers that were cut off, threads that
// still compute, the engine and its writes to disk.
constexpr double kCutS = 1, kThreadsEndS = 0.5, kEngineEndS = 10;
constexpr int kMaxRefused = 16;  // connections that are told so at the same time; others are closed at once

class Server {
 public:
  // `own_process`: signals end it, and it ends the process if its threads do not.
  Server(Api& api, const ServerOptions& options, bool own_process)
      : api_(api),
        options_(options),
        own_process_(own_process),
        workers_([&api](const HttpRequest& request, const Client& client,
                        const WorkLimits& limits) { return api.handle(request, client, limits); },
                 {.threads = options.threads,
                  .slow_threads = options.slow_threads,
                  .slow_requests = options.slow_queue,
                  .timeout_s = options.work_timeout_s},
                 api.counters().queued_work),
        addresses_(options.max_connections_per_address > 0 ? options.max_connections_per_address
                                                           : (options.max_connections + 1) / 2),
        io_(options.threads),
        acceptor_(control_),
        signals_(control_),
        last_resort_(api.log()) {
    api.counters().queued_work_limit = static_cast<int64_t>(options.slow_queue);
    if (own_process) {
      for (const int signal : {SIGINT, SIGTERM, SIGHUP}) signals_.add(signal);
    }
    if (!options.tls_cert.empty()) tls_ = make_tls(options.tls_cert, options.tls_key);
    api_.run_work = [this](std::function<void()> work) { workers_.post(std::move(work)); };
    api_.run_detached = [this](std::shared_ptr<Answer> answer) {
      asio::co_spawn(asio::make_strand(io_), run_detached(std::move(answer)), asio::detached);
    };
  }

  std::string listen();
  void run();
  // From any thread: what is under way is finished, as after a signal.
  void end() {
    asio::post(control_, [this] { begin_end(); });
  }

 private:
  Awaitable<void> accept_loop();
  Awaitable<void> signal_loop();
  void begin_end();
  void end_process_at(std::chrono::steady_clock::time_point when);
  Awaitable<void> drain();
  Awaitable<void> sample_loop();
  Awaitable<void> run_detached(std::shared_ptr<Answer> answer);
  void refuse(tcp::socket socket, const ApiError& why);
  Awaitable<void> last_words(std::shared_ptr<tcp::socket> socket);
  void stop_connections(bool at_once);

  Api& api_;
  const ServerOptions& options_;
  const bool own_process_;
  std::unique_ptr<asio::ssl::context> tls_;
  WorkLanes workers_;
  AddressCounts addresses_;
  asio::io_context io_;
  // The listener, the signals and the loops below have a thread of their own: no request can hold them up,
  // and what they share needs no lock.
  asio::io_context control_{1};
  tcp::acceptor acceptor_;
  asio::signal_set signals_;
  LastResort last_resort_;
  std::chrono::steady_clock::time_point deadline_;  // of draining
  bool ending_ = false;

  int refused_ = 0;  // connections that are being refused

  std::mutex mutex_;
  std::list<std::weak_ptr<Connection>> connections_;
  std::atomic<int64_t> detached_{0};
};

std::string Server::listen() {
  error_code error;
  tcp::resolver resolver(io_);
  // Numbers and "localhost" need no network; a name is looked up.
  const auto found =
      resolver.resolve(options_.host, std::to_string(options_.port), tcp::resolver::passive, error);
  if (error || found.empty()) {
    throw_error(ErrorCode::kBadInput,
                "--host: found {}: {}, expected an address such as 127.0.0.1 or 0.0.0.0", options_.host,
                error.message());
  }
  const tcp::endpoint endpoint = found.begin()->endpoint();
  const auto check = [&](const char* what) {
    if (!error) return;
    const bool taken = error == asio::error::address_in_use;
    throw_error(ErrorCode::kIo, "cannot {} {}:{}: {}{}", what, options_.host, options_.port, error.message(),
                taken ? "; --port chooses another" : "");
  };
  acceptor_.open(endpoint.protocol(), error);
  check("open a socket for");
  acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
  check("set up");
  acceptor_.bind(endpoint, error);
  check("bind to");
  acceptor_.listen(tcp::acceptor::max_listen_connections, error);
  check("listen on");
  const tcp::endpoint at = acceptor_.local_endpoint();
  const std::string address = at.address().to_string();
  return fmt::format("{}://{}:{}", tls_ ? "https" : "http",
                     at.address().is_v6() ? "[" + address + "]" : address, at.port());
}

void Server::run() {
  asio::co_spawn(control_, accept_loop(), asio::detached);
  if (own_process_) asio::co_spawn(control_, signal_loop(), asio::detached);
  asio::co_spawn(control_, sample_loop(), asio::detached);
  const auto work = asio::make_work_guard(io_);
  std::vector<std::thread> threads;
  {
    const ThreadName name("http");
    for (int i = 0; i < options_.threads; ++i) threads.emplace_back([this] { io_.run(); });
  }
  control_.run();
  // From here on a signal has its usual effect: it ends the process.
  signals_.clear();
  end_process_at(std::chrono::steady_clock::now() + seconds(kThreadsEndS));
  io_.stop();
  workers_.stop();
  for (std::thread& thread : threads) thread.join();
  end_process_at(std::chrono::steady_clock::now() + seconds(kEngineEndS));
}

void Server::end_process_at(std::chrono::steady_clock::time_point when) {
  if (own_process_) last_resort_.end_at(when);
}

// Says why and closes. What the client has sent is read meanwhile: closed with that unread, the connection
// would break before the client has read its answer.
void Server::refuse(tcp::socket socket, const ApiError& why) {
  const std::string body = error_body(why);
  std::string text = fmt::format(
      "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
      "content-length: {}\r\nconnection: close\r\n\r\n{}",
      why.status, reason_phrase(why.status), body.size(), body);
  error_code ignored;
  socket.non_blocking(true, ignored);
  socket.write_some(asio::buffer(text), ignored);  // fits any socket's buffer
  socket.shutdown(tcp::socket::shutdown_send, ignored);
  if (refused_ >= kMaxRefused) return;
  ++refused_;
  asio::co_spawn(control_, last_words(std::make_shared<tcp::socket>(std::move(socket))), asio::detached);
}

Awaitable<void> Server::last_words(std::shared_ptr<tcp::socket> socket) {
  asio::steady_timer timer(control_, seconds(1));
  timer.async_wait([socket](error_code error) {
    if (!error) socket->close(error);
  });
  std::array<char, 1024> ignored_bytes{};
  error_code error;
  for (int i = 0; i < 64 && !error; ++i) {
    co_await socket->async_read_some(asio::buffer(ignored_bytes),
                                     asio::redirect_error(asio::use_awaitable, error));
  }
  timer.cancel();
  --refused_;
}

Awaitable<void> Server::accept_loop() {
  while (acceptor_.is_open()) {
    auto strand = asio::make_strand(io_);
    error_code error;
    tcp::socket socket =
        co_await acceptor_.async_accept(strand, asio::redirect_error(asio::use_awaitable, error));
    if (!acceptor_.is_open()) break;
    if (error) {
      // Out of files: wait for some to be closed rather than spin.
      api_.log().write("error", "accept failed", {{"reason", error.message()}});
      asio::steady_timer pause(control_, seconds(0.1));
      co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, error));
      continue;
    }
    if (ending_) {
      refuse(std::move(socket), {503, "the server is shutting down", "", "shutting_down"});
      continue;
    }
    if (api_.counters().connections >= options_.max_connections) {
      ++api_.counters().refused_connections;
      refuse(std::move(socket), {503, "too many connections", "", "too_many_connections"});
      continue;
    }
    const tcp::endpoint endpoint = socket.remote_endpoint(error);
    const std::string remote = error ? std::string() : endpoint.address().to_string();
    // Behind a proxy everybody has the proxy's address, and it counts connections itself.
    const bool proxy = options_.trust_proxy && is_private_address(remote);
    std::shared_ptr<void> share = proxy ? nullptr : addresses_.enter(remote);
    if (!share && !proxy) {
      ++api_.counters().refused_connections;
      refuse(std::move(socket), {429, "too many connections from this address", "", "too_many_connections"});
      continue;
    }
    auto connection = std::make_shared<Connection>(
        api_, workers_, strand, make_transport(std::move(socket), tls_.get()), remote, std::move(share));
    {
      const std::lock_guard lock(mutex_);
      std::erase_if(connections_, [](const auto& c) { return c.expired(); });
      connections_.push_back(connection);
    }
    asio::co_spawn(
        strand, [](std::shared_ptr<Connection> c) -> Awaitable<void> { co_await c->run(); }(connection),
        [this](const std::exception_ptr& error_ptr) {
          if (!error_ptr) return;
          try {
            std::rethrow_exception(error_ptr);
          } catch (const std::exception& e) {
            api_.log().write("error", "connection failed", {{"reason", std::string(e.what())}});
          }
        });
  }
}

Awaitable<void> Server::signal_loop() {
  while (true) {
    error_code error;
    const int signal = co_await signals_.async_wait(asio::redirect_error(asio::use_awaitable, error));
    if (error) co_return;
    if (signal == SIGHUP) {
      api_.reload_keys();
      api_.models().rescan();
      continue;
    }
    if (ending_) {
      api_.log().write("warn", "second signal: ending at once");
      deadline_ = {};
      end_process_at(std::chrono::steady_clock::now() + seconds(2 * kCutS + kThreadsEndS));
      continue;
    }
    begin_end();
  }
}

void Server::begin_end() {
  if (std::exchange(ending_, true)) return;
  if (own_process_) {
    api_.log().write("info", "draining", {{"streams", static_cast<double>(api_.counters().streams)}});
  }
  asio::co_spawn(control_, drain(), asio::detached);
}

void Server::stop_connections(bool at_once) {
  const std::lock_guard lock(mutex_);
  for (const auto& weak : connections_) {
    if (const auto connection = weak.lock()) connection->stop(at_once);
  }
}

Awaitable<void> Server::drain() {
  // Who connects from here on is told so: those who watch the server see why it takes no requests.
  api_.set_draining();
  error_code ignored;
  stop_connections(false);
  deadline_ = std::chrono::steady_clock::now() + seconds(options_.drain_timeout_s);
  std::optional<std::chrono::steady_clock::time_point> cut;
  asio::steady_timer pause(control_);
  while (api_.counters().connections > 0 || detached_ > 0) {
    const auto now = std::chrono::steady_clock::now();
    if (!cut && now > deadline_) {
      cut = now;
      api_.log().write("warn", "cancelling what is left",
                       {{"streams", static_cast<double>(api_.counters().streams)}});
      stop_connections(true);
    }
    if (cut && now > *cut + seconds(kCutS)) break;
    pause.expires_after(seconds(0.02));
    co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
  if (own_process_) api_.log().write("info", "stopped");
  acceptor_.close(ignored);
  control_.stop();
}

Awaitable<void> Server::sample_loop() {
  asio::steady_timer timer(control_, std::chrono::steady_clock::now());
  while (!ending_) {
    api_.timeline().sample(api_.models().stats(), api_.counters().streams);
    timer.expires_at(timer.expiry() + seconds(1));
    error_code ignored;
    co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
}

Awaitable<void> Server::run_detached(std::shared_ptr<Answer> answer) {
  ++detached_;
  auto waiter = std::make_shared<Waiter>(co_await asio::this_coro::executor);
  answer->on_ready([waiter] { waiter->wake_from_elsewhere(); });
  std::string ignored;
  while (!answer->advance(ignored, 1 << 16)) {
    ignored.clear();
    co_await waiter->until(std::chrono::steady_clock::now() + std::chrono::hours(1));
  }
  --detached_;
}

}  // namespace

void serve(ModelSet& models, const ServerOptions& options,
           const std::function<void(const std::string& url)>& listening) {
  keep_heap_small();
  ServerOptions within = options;
  within.max_connections = connections_within(raise_file_limit(), options.max_connections);
  Api api(models, within);
  if (within.max_connections < options.max_connections) {
    api.log().write("warn", "the limit of open files leaves fewer connections (ulimit -Hn)",
                    {{"max_connections", static_cast<double>(within.max_connections)},
                     {"wanted", static_cast<double>(options.max_connections)}});
  }
  Server server(api, within, true);
  const std::string url = server.listen();
  listening(url);
  server.run();
  models.stop();  // what it still calls is here
}

void serve_inside(ModelSet& models, const ServerOptions& options,
                  const std::function<void(const std::string& url)>& listening, const std::stop_token& stop) {
  Api api(models, options);
  Server server(api, options, false);
  listening(server.listen());
  const std::stop_callback end(stop, [&server] { server.end(); });
  server.run();
}

}  // namespace millrace::server
