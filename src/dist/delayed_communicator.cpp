#include "dist/delayed_communicator.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <thread>

#include "base/error.h"
#include "dist/point_to_point.h"

namespace millrace::dist {
namespace {

using Clock = std::chrono::steady_clock;                      // one for all processes of a machine
constexpr auto kShortSleep = std::chrono::microseconds(200);  // below it, sleeping may take longer than asked

void wait_until(Clock::time_point time) {
  for (auto now = Clock::now(); now < time; now = Clock::now()) {
    if (time - now > kShortSleep) {
      std::this_thread::sleep_for(time - now - kShortSleep / 2);
    } else {
      std::this_thread::yield();
    }
  }
}

class DelayedCommunicator final : public PointToPoint {
 public:
  // line_free: when what was sent is out, one for all groups that a rank is in.
  DelayedCommunicator(std::unique_ptr<Communicator> inner, const LinkDelay& delay,
                      std::shared_ptr<Clock::time_point> line_free)
      : inner_(std::move(inner)),
        delay_(delay),
        name_(fmt::format("delayed {}", inner_->name())),
        line_free_(std::move(line_free)) {}

  std::string_view name() const override { return name_; }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }

  void send(int to, std::span<const std::byte> bytes) override { inner_->send(to, message(bytes)); }
  void recv(int from, std::span<std::byte> bytes) override {
    in_.resize(sizeof(Header) + bytes.size());
    inner_->recv(from, in_);
    deliver(bytes);
  }
  void send_recv(int to, std::span<const std::byte> out, int from, std::span<std::byte> in) override {
    in_.resize(sizeof(Header) + in.size());
    inner_->send_recv(to, message(out), from, in_);
    deliver(in);
    --traffic_.calls;
  }

  std::unique_ptr<Communicator> split(int colour, int key) override {
    return std::make_unique<DelayedCommunicator>(inner_->split(colour, key), delay_, line_free_);
  }
  Traffic traffic() const override { return traffic_; }

 private:
  struct Header {
    int64_t arrives_ns;
  };

  // The message with the time it is there.
  std::span<const std::byte> message(std::span<const std::byte> bytes) {
    const auto seconds = std::chrono::duration<double>(
        delay_.bytes_per_s > 0 ? static_cast<double>(bytes.size()) / delay_.bytes_per_s : 0.0);
    *line_free_ = std::max(*line_free_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(seconds);
    const auto there = *line_free_ + std::chrono::duration_cast<Clock::duration>(
                                         std::chrono::duration<double>(delay_.latency_s));
    const Header header{
        std::chrono::duration_cast<std::chrono::nanoseconds>(there.time_since_epoch()).count()};
    const auto head = std::as_bytes(std::span(&header, 1));
    out_.assign(head.begin(), head.end());
    out_.insert(out_.end(), bytes.begin(), bytes.end());
    traffic_.bytes_sent += bytes.size();
    ++traffic_.calls;
    return out_;
  }

  void deliver(std::span<std::byte> bytes) {
    Header header{};
    std::copy_n(in_.begin(), sizeof(Header), std::as_writable_bytes(std::span(&header, 1)).begin());
    std::copy(in_.begin() + sizeof(Header), in_.end(), bytes.begin());
    wait_until(Clock::time_point(
        std::chrono::duration_cast<Clock::duration>(std::chrono::nanoseconds(header.arrives_ns))));
    traffic_.bytes_received += bytes.size();
    ++traffic_.calls;
  }

  std::unique_ptr<Communicator> inner_;
  LinkDelay delay_;
  std::string name_;
  const std::shared_ptr<Clock::time_point> line_free_;
  std::vector<std::byte> out_, in_;
  Traffic traffic_;
};

}  // namespace

std::unique_ptr<Communicator> make_delayed(std::unique_ptr<Communicator> inner, const LinkDelay& delay) {
  if (!(delay.latency_s >= 0) || !(delay.bytes_per_s >= 0)) {
    throw_error(ErrorCode::kBadInput, "link delay: found {} s and {} bytes/s, expected neither below 0",
                delay.latency_s, delay.bytes_per_s);
  }
  return std::make_unique<DelayedCommunicator>(std::move(inner), delay,
                                               std::make_shared<Clock::time_point>());
}

std::optional<LinkDelay> parse_link_delay(std::string_view name, std::string_view text) {
  if (text.empty()) return std::nullopt;
  double us = -1, mbit = -1;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, us);
  const bool comma = first.ec == std::errc() && first.ptr != end && *first.ptr == ',';
  const auto second = comma ? std::from_chars(first.ptr + 1, end, mbit) : first;
  if (!comma || second.ec != std::errc() || second.ptr != end || !(us >= 0 && us <= 1e7) ||
      !(mbit >= 0 && mbit <= 1e9)) {
    throw_error(ErrorCode::kBadInput, "{}: found {}, expected microseconds and Mbit/s such as 50,1000", name,
                text);
  }
  return LinkDelay{us * 1e-6, mbit * 1e6 / 8};
}

}  // namespace millrace::dist
