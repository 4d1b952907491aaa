#include "dist/watched_communicator.h"

#include <chrono>

#include "base/check.h"

namespace millrace::dist {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void add(std::atomic<uint64_t>& count, size_t bytes) {
  count.store(count.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
}

class WatchedCommunicator final : public Communicator {
 public:
  WatchedCommunicator(std::unique_ptr<Communicator> inner, Watch& watch)
      : inner_(std::move(inner)), watch_(watch) {
    MILLRACE_CHECK(inner_->size() <= kMaxTensorRanks);
  }

  std::string_view name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }

  void send(int to, std::span<const std::byte> bytes) override {
    const Call call(watch_);
    inner_->send(to, bytes);
    sent(to, bytes.size());
  }
  void recv(int from, std::span<std::byte> bytes) override {
    const Call call(watch_);
    inner_->recv(from, bytes);
    received(from, bytes.size());
  }
  void send_recv(int to, std::span<const std::byte> out, int from, std::span<std::byte> in) override {
    const Call call(watch_);
    inner_->send_recv(to, out, from, in);
    sent(to, out.size());
    received(from, in.size());
  }
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all,
                  std::span<const size_t> bytes_of_rank) override {
    const Call call(watch_);
    inner_->all_gather(mine, all, bytes_of_rank);
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      sent(r, mine.size());
      received(r, bytes_of_rank[static_cast<size_t>(r)]);
    }
  }
  void all_to_all(std::span<const std::byte> out, std::span<const size_t> out_bytes, std::span<std::byte> in,
                  std::span<const size_t> in_bytes) override {
    const Call call(watch_);
    inner_->all_to_all(out, out_bytes, in, in_bytes);
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      sent(r, out_bytes[static_cast<size_t>(r)]);
      received(r, in_bytes[static_cast<size_t>(r)]);
    }
  }
  void broadcast(int root, std::span<std::byte> bytes) override {
    const Call call(watch_);
    inner_->broadcast(root, bytes);
    if (rank() != root) return received(root, bytes.size());
    for (int r = 0; r < size(); ++r) {
      if (r != root) sent(r, bytes.size());
    }
  }
  void barrier() override {
    const Call call(watch_);
    inner_->barrier();
  }

  // A part of the group is nobody's to watch.
  std::unique_ptr<Communicator> split(int colour, int key) override { return inner_->split(colour, key); }
  Traffic traffic() const override { return inner_->traffic(); }

 private:
  class Call {
   public:
    explicit Call(Watch& watch) : watch_(watch) {
      watch_.waiting_since_ns.store(now_ns(), std::memory_order_relaxed);
    }
    ~Call() {
      watch_.waiting_since_ns.store(0, std::memory_order_relaxed);
      add(watch_.calls, 1);
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Watch& watch_;
  };

  void sent(int to, size_t bytes) { add(watch_.sent[static_cast<size_t>(to)], bytes); }
  void received(int from, size_t bytes) { add(watch_.received[static_cast<size_t>(from)], bytes); }

  std::unique_ptr<Communicator> inner_;
  Watch& watch_;
};

}  // namespace

double Watch::waiting_s() const {
  const int64_t since = waiting_since_ns.load(std::memory_order_relaxed);
  return since == 0 ? 0.0 : static_cast<double>(now_ns() - since) * 1e-9;
}

std::unique_ptr<Communicator> make_watched(std::unique_ptr<Communicator> inner, Watch& watch) {
  return std::make_unique<WatchedCommunicator>(std::move(inner), watch);
}

void measure_links(Communicator& group, Watch& watch) {
  constexpr size_t kBytes = size_t{256} << 10;  // of a long message
  for (int a = 0; a < group.size(); ++a) {
    for (int b = a + 1; b < group.size(); ++b) {
      const LinkSpeed speed = measure_link(group, a, b, kBytes);
      if (group.rank() != a && group.rank() != b) continue;
      const auto other = static_cast<size_t>(group.rank() == a ? b : a);
      watch.latency_s[other].store(speed.latency_s, std::memory_order_relaxed);
      watch.bytes_per_s[other].store(speed.bytes_per_s, std::memory_order_relaxed);
    }
  }
}

}  // namespace millrace::dist
