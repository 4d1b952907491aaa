#include "engine/rank_front.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>

#include "base/error.h"
#include "engine/rank_group.h"
#include "engine/ranks_lost.h"

namespace millrace {
namespace {

constexpr double kJoinSeconds = 60;     // from launching to the last hello; a rank loads after it
constexpr double kLongJoin = 10;        // after which it is said who has not come
constexpr double kHelloSeconds = 5;     // for a connection to say who it is
constexpr size_t kMostNewcomers = 64;   // of connections that have not
constexpr int kTickMs = 100;            // how often what makes no noise is looked at
constexpr double kOrderlyEnd = 5;       // seconds for ranks to end when they are told to
constexpr double kLastWords = 2.0;      // seconds for what a rank that has gone had to say, and for mpirun
constexpr double kLongestPause = 10.0;  // seconds between two attempts

double since(std::chrono::steady_clock::time_point time) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - time).count();
}

// Not fmt::print, which throws where standard error is closed.
void say(const std::string& line) { std::fputs(fmt::format("millrace: {}\n", line).c_str(), stderr); }

std::string name_of(const dist::Hello& hello) {
  return fmt::format("rank {} (process {} on {})", hello.rank, hello.pid, hello.host);
}

}  // namespace

RankFront::RankFront(EngineOptions options, Claims claims, std::function<void()> wake)
    : options_(std::move(options)), claims_(std::move(claims)), wake_(std::move(wake)) {
  uint16_t port = 0;
  try {
    listener_ = dist::listen_on(options_.front_address, port);
  } catch (const Error& error) {
    throw_error(error.code(), "--front-address: {}", error.what());
  }
  address_ = fmt::format("{}:{}", options_.front_address, port);
  thread_ = std::thread([this] { run(); });
}

RankFront::~RankFront() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (data_) data_->shut_down();  // rank 0 ends, and tells the others
  }
  news_.notify_all();
  thread_.join();
}

// ---------------------------------------------------------------- the engine's side

void RankFront::start(const std::function<void()>& tick) {
  std::unique_lock lock(mutex_);
  ordered_ = true;
  news_.notify_all();
  const auto settled = [&] {
    return state_ == State::kUp || state_ == State::kFailed || state_ == State::kLost;
  };
  while (!news_.wait_for(lock, std::chrono::milliseconds(kTickMs), settled)) {
    lock.unlock();
    tick();
    lock.lock();
  }
  if (state_ != State::kUp) throw_error(ErrorCode::kBadInput, "{}", why_);
}

bool RankFront::up() const {
  const std::lock_guard lock(mutex_);
  return state_ == State::kUp;
}

std::string RankFront::loss() const {
  const std::lock_guard lock(mutex_);
  return why_;
}

void RankFront::form_again() {
  const std::lock_guard lock(mutex_);
  ordered_ = true;
  news_.notify_all();
}

void RankFront::send(const RankMessage& message, std::span<const std::byte> bytes) {
  std::shared_ptr<dist::Socket> data;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kUp) data = data_;
  }
  if (!data || !data->send(std::as_bytes(std::span(&message, 1))) || !data->send(bytes)) throw_lost();
}

void RankFront::recv(std::span<std::byte> bytes) {
  std::shared_ptr<dist::Socket> data;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kUp) data = data_;
  }
  if (!data || !data->recv(bytes)) throw_lost();
}

bool RankFront::answered() {
  std::shared_ptr<dist::Socket> data;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kUp) data = data_;
  }
  if (!data) throw_lost();
  return data->readable(0);  // also for its end, which recv finds
}

void RankFront::computes() { computes_ = true; }

RankFront::Loaded RankFront::loaded() const {
  const std::lock_guard lock(mutex_);
  Loaded loaded;
  for (const Rank& rank : ranks_) {
    loaded.done += rank.beat.loaded;
    loaded.all += rank.beat.to_load;
  }
  return loaded;
}

// The connection has ended; whoever watches the ranks knows which of them it was, or will in a moment.
void RankFront::throw_lost() {
  std::unique_lock lock(mutex_);
  news_.wait_for(lock, std::chrono::duration<double>(kSilence), [&] { return state_ != State::kUp; });
  if (state_ == State::kUp) {  // rank 0 alone has closed it
    why_ = "rank 0 has ended its connection";
    state_ = State::kLost;
  }
  throw RanksLost(why_);
}

RankGroupStats RankFront::stats() const {
  const std::lock_guard lock(mutex_);
  RankGroupStats stats;
  stats.wanted = ranks_of(options_);
  stats.up = state_ == State::kUp && computes_;
  stats.last_loss = why_;
  stats.restarts = restarts_;
  if (state_ != State::kUp) return stats;
  for (const Rank& rank : ranks_) {
    RankStats& to = stats.ranks.emplace_back();
    to.rank = rank.hello.rank;
    to.host = rank.hello.host;
    to.pid = rank.hello.pid;
    to.heard_s = since(rank.heard);
    to.waiting_s = rank.beat.waiting_s;
    to.exchanges = rank.beat.calls;
    to.sent.assign(rank.beat.sent.begin(), rank.beat.sent.begin() + std::ssize(ranks_));
    to.received.assign(rank.beat.received.begin(), rank.beat.received.begin() + std::ssize(ranks_));
    to.latency_s.assign(rank.beat.latency_s.begin(), rank.beat.latency_s.begin() + std::ssize(ranks_));
    to.bytes_per_s.assign(rank.beat.bytes_per_s.begin(), rank.beat.bytes_per_s.begin() + std::ssize(ranks_));
  }
  return stats;
}

// ---------------------------------------------------------------- its own thread

void RankFront::tell(State state, const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    state_ = state;
    if (!why.empty()) why_ = why;
    if (state != State::kUp && data_) data_->shut_down();  // wakes an engine that waits for an answer
  }
  news_.notify_all();
  if (state == State::kUp || state == State::kLost) wake_();
}

void RankFront::run() {
  for (bool first = true;; first = false) {
    {
      std::unique_lock lock(mutex_);
      news_.wait(lock, [&] { return ordered_ || stopping_; });
      if (stopping_) return;
      ordered_ = false;
      // A group that was lost before it computed was an attempt that failed.
      attempts_ = first || computes_ ? 0 : attempts_ + 1;
    }
    if (!form_at_last(first)) return;
    {
      const std::lock_guard lock(mutex_);
      restarts_ += first ? 0 : 1;
    }
    const int ranks = ranks_of(set_.options);
    if (!first) say(fmt::format("{} rank{} started anew", ranks, ranks == 1 ? " was" : "s were"));
    tell(State::kUp, "");
    const std::string why = watch();
    if (why.empty()) break;             // stopping
    if (!first || computes_) say(why);  // else whoever starts is told
    tell(State::kLost, why);
    end_group(gone_ ? kLastWords : 0);
  }
  if (!computes_) launched_.end(0);  // ranks that load hear nothing
  end_group(kOrderlyEnd);
}

// As often as it takes, but for the first group once. False: there is none, and will be none.
bool RankFront::form_at_last(bool first) {
  for (;; ++attempts_) {
    if (attempts_ > 0 && !paused()) return false;
    tell(State::kForming, "");
    std::string why;
    try {
      why = form(next_set());
    } catch (const std::exception& error) {
      why = error.what();
    }
    if (stopping_) {
      launched_.end(0);
      end_group(0);
      return false;
    }
    if (why.empty()) return true;
    end_group(kLastWords);
    if (first) {  // whoever starts is told
      tell(State::kFailed, why);
      return false;
    }
    say("the ranks could not be started anew: " + why);
    const std::lock_guard lock(mutex_);
    why_ = why;
  }
}

// Waits for longer with every attempt. False: the front is to end.
bool RankFront::paused() {
  const double pause = std::min(kLongestPause, 0.25 * static_cast<double>(1 << std::min(attempts_, 8)));
  std::unique_lock lock(mutex_);
  return !news_.wait_for(lock, std::chrono::duration<double>(pause), [&] { return stopping_.load(); });
}

// All ranks first; when they do not come, and fewer will do, those without the lost one; and so in turn. If
// that does not help either, it may have been another one: they are left out one after the other.
RankSet RankFront::next_set() const {
  const int ranks = ranks_of(options_);
  if (!options_.shrink || attempts_ % 2 == 0) return rank_set(options_, -1);
  const int blamed = lost_rank_ >= 0 ? lost_rank_ : ranks - 1;
  const int together = options_.pipeline_parallel > 1 ? options_.tensor_parallel : 1;
  return rank_set(options_, (blamed + attempts_ / 2 * together) % ranks);
}

// Empty: every rank is there. Else why not.
std::string RankFront::form(const RankSet& set) {
  set_ = set;
  key_ = dist::make_key();
  wanted_ = claims_(set.options);
  refusal_.clear();
  newcomers_.clear();
  {
    const std::lock_guard lock(mutex_);
    ranks_.clear();
    ranks_.resize(static_cast<size_t>(ranks_of(set.options)));
    data_.reset();
    computes_ = false;
  }
  const auto begin = Clock::now();
  bool told = false;
  std::string waits_for;
  launched_ = Launched(launch_command(set, address_), key_);
  for (;;) {
    listen_for(kTickMs);
    if (!refusal_.empty()) return refusal_;
    if (!told && !waits_for.empty()) {
      told = true;
      say("waiting for " + waits_for);
    }
    const std::lock_guard lock(mutex_);
    if (stopping_) return "the server is shutting down";
    if (all_joined()) return {};
    std::string found = fault();
    if (!found.empty()) return found;
    if (const auto end = launched_.ended()) return fmt::format("the ranks' launcher {}", *end);
    if (since(begin) > kJoinSeconds) {
      return fmt::format("{} did not come within {} s", absent(), kJoinSeconds);
    }
    if (since(begin) > kLongJoin && waits_for.empty()) waits_for = absent();
  }
}

// "rank 1 (node2), rank 2 (node3), of 3 ranks", under the lock.
std::string RankFront::absent() const {
  std::vector<std::string> names;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].socket && (r > 0 || data_)) continue;
    names.push_back(set_.hosts.empty() ? fmt::format("rank {}", r)
                                       : fmt::format("rank {} ({})", r, set_.hosts[r]));
  }
  return fmt::format("{}, of {} ranks", fmt::join(names, ", "), ranks_.size());
}

bool RankFront::all_joined() const {
  return data_ && std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return !!rank.socket; });
}

// Why the group is lost; empty when the front is to end.
std::string RankFront::watch() {
  for (;;) {
    listen_for(kTickMs);
    const std::lock_guard lock(mutex_);
    if (stopping_) return {};
    if (state_ == State::kLost) return why_;  // the engine saw it first
    std::string why = fault();
    if (why.empty()) {
      if (const auto end = launched_.ended()) why = fmt::format("the ranks' launcher {}", *end);
    }
    if (why.empty()) continue;
    lost_rank_ = -1;
    gone_ = std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return !rank.socket; });
    for (const Rank& rank : ranks_) {
      if (!rank.socket || since(rank.heard) > kSilence) lost_rank_ = rank.hello.rank;
      if (lost_rank_ >= 0) break;
    }
    // Of a group that had one rank fewer, the numbers are not those of the options.
    if (static_cast<int>(ranks_.size()) != ranks_of(options_)) lost_rank_ = -1;
    return why;
  }
}

// What the connections say, under the lock.
std::string RankFront::fault() const {
  bool all_wait = !ranks_.empty();
  for (const Rank& rank : ranks_) {
    if (!rank.socket) {
      if (rank.hello.pid != 0) return fmt::format("{} has gone", name_of(rank.hello));
      all_wait = false;  // it has not come yet
      continue;
    }
    const double silent = since(rank.heard);
    if (silent > kSilence)
      return fmt::format("{} was not heard of for {:.1f} s", name_of(rank.hello), silent);
    all_wait = all_wait && rank.beat.waiting_s > kSilence;
  }
  return all_wait ? "a link between ranks is down: all of them wait for one another" : "";
}

void RankFront::end_group(double patience_s) {
  if (patience_s > 0) launched_.end(patience_s);  // rank 0 was told; beats may still come
  {
    const std::lock_guard lock(mutex_);
    if (data_) data_->shut_down();
    for (Rank& rank : ranks_) rank.socket.close();  // a rank that reads this end ends too
  }
  newcomers_.clear();
  launched_.end(0);
}

// Takes in what has come: connections, hellos and beats.
void RankFront::listen_for(int timeout_ms) {
  std::vector<pollfd> waits{{.fd = listener_.fd(), .events = POLLIN, .revents = 0}};
  {
    const std::lock_guard lock(mutex_);
    for (const Rank& rank : ranks_) {
      if (rank.socket) waits.push_back({.fd = rank.socket.fd(), .events = POLLIN, .revents = 0});
    }
  }
  for (const Newcomer& n : newcomers_) waits.push_back({.fd = n.socket.fd(), .events = POLLIN, .revents = 0});
  if (::poll(waits.data(), waits.size(), timeout_ms) <= 0) return;
  const auto ready = [&](const dist::Socket& socket) {
    return socket && std::any_of(waits.begin(), waits.end(), [&](const pollfd& wait) {
             return wait.fd == socket.fd() && wait.revents != 0;
           });
  };
  {
    const std::lock_guard lock(mutex_);
    for (Rank& rank : ranks_) {
      if (ready(rank.socket)) read_beats(rank);
    }
  }
  for (Newcomer& newcomer : newcomers_) {
    if (ready(newcomer.socket)) read_newcomer(newcomer);
  }
  std::erase_if(newcomers_, [](const Newcomer& n) { return !n.socket || since(n.since) > kHelloSeconds; });
  if (waits.front().revents == 0) return;
  dist::Socket socket = dist::accept_from(listener_);
  if (!socket) return;
  // A rank says who it is at once: it is not kept out by others that say nothing.
  if (newcomers_.size() == kMostNewcomers) newcomers_.erase(newcomers_.begin());
  newcomers_.push_back({std::move(socket), {}, Clock::now()});
}

void RankFront::read_newcomer(Newcomer& newcomer) {
  const auto bytes = newcomer.socket.take(dist::kMaxHello);
  if (!bytes) return newcomer.socket.close();
  for (const std::byte byte : *bytes) newcomer.line += static_cast<char>(byte);
  if (newcomer.line.size() > dist::kMaxHello) return newcomer.socket.close();
  const size_t end = newcomer.line.find('\n');
  if (end == std::string::npos) return;
  // A rank says nothing more until it is answered; whoever has no key gets no answer.
  const std::optional<dist::Hello> hello = dist::hello_of(std::string_view(newcomer.line).substr(0, end));
  if (!hello || end + 1 != newcomer.line.size() || !dist::same_key(hello->key, key_)) {
    return newcomer.socket.close();
  }
  const std::string refusal = join(newcomer, *hello);
  if (refusal.empty()) return;
  newcomer.socket.send_line(refusal);
  newcomer.socket.close();
  if (refusal_.empty()) refusal_ = refusal;
}

// Empty: it is one of the group now. Else why not.
std::string RankFront::join(Newcomer& newcomer, dist::Hello hello) {
  const std::lock_guard lock(mutex_);
  const auto count = std::ssize(ranks_);
  if (hello.rank < 0 || hello.rank >= count || hello.ranks != count) {
    return fmt::format("the launcher made process {} on {} rank {} of {}, expected {} ranks", hello.pid,
                       hello.host, hello.rank, hello.ranks, count);
  }
  if (hello.data) {
    if (hello.rank != 0 || data_) return fmt::format("{} is not the first to serve", name_of(hello));
    if (!newcomer.socket.send_line("")) return fmt::format("{} has gone", name_of(hello));
    data_ = std::make_shared<dist::Socket>(std::move(newcomer.socket));
    return {};
  }
  Rank& rank = ranks_[static_cast<size_t>(hello.rank)];
  if (rank.socket) return fmt::format("{} was there already", name_of(hello));
  for (const dist::Claim& claim : wanted_) {
    const auto same = std::find_if(hello.claims.begin(), hello.claims.end(),
                                   [&](const dist::Claim& c) { return c.name == claim.name; });
    const std::string has = same == hello.claims.end() ? "none" : same->value;
    if (has == claim.value) continue;
    return fmt::format("{}: {} has '{}', the front has '{}'", claim.name, name_of(hello), has, claim.value);
  }
  if (!newcomer.socket.send_line("")) return fmt::format("{} has gone", name_of(hello));
  rank.hello = std::move(hello);
  rank.hello.key.clear();
  rank.heard = Clock::now();
  rank.socket = std::move(newcomer.socket);
  return {};
}

void RankFront::read_beats(Rank& rank) {
  const auto bytes = rank.socket.take(16 * sizeof(dist::Beat));
  if (!bytes) return rank.socket.close();
  if (bytes->empty()) return;
  rank.heard = Clock::now();
  rank.part.insert(rank.part.end(), bytes->begin(), bytes->end());
  const size_t whole = rank.part.size() / sizeof(dist::Beat) * sizeof(dist::Beat);
  if (whole == 0) return;
  std::memcpy(&rank.beat, rank.part.data() + whole - sizeof(dist::Beat), sizeof(dist::Beat));
  rank.part.erase(rank.part.begin(), rank.part.begin() + static_cast<std::ptrdiff_t>(whole));
}

}  // namespace millrace
