#include "dist/watched_communicator.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <vector>

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
  // names[r]: what `watch` calls rank r.
  WatchedCommunicator(std::unique_ptr<Communicator> inner, Watch& watch, std::vector<int32_t> names)
      : inner_(std::move(inner)), watch_(watch), names_(std::move(names)) {
    MILLRACE_CHECK(inner_->size() <= kMaxTensorRanks && names_.size() == static_cast<size_t>(size()));
  }

  std::string_view name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }

  void send(int to, std::span<const std::byte> bytes) override {
    const Call call(watch_, bytes.size());
    inner_->send(to, bytes);
    sent(to, bytes.size());
  }
  void recv(int from, std::span<std::byte> bytes) override {
    const Call call(watch_, bytes.size());
    inner_->recv(from, bytes);
    received(from, bytes.size());
  }
  void send_recv(int to, std::span<const std::byte> out, int from, std::span<std::byte> in) override {
    const Call call(watch_, std::max(out.size(), in.size()));
    inner_->send_recv(to, out, from, in);
    sent(to, out.size());
    received(from, in.size());
  }
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all,
                  std::span<const size_t> bytes_of_rank) override {
    const Call call(watch_, std::max(all.size(), mine.size() * static_cast<size_t>(size())));
    inner_->all_gather(mine, all, bytes_of_rank);
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      sent(r, mine.size());
      received(r, bytes_of_rank[static_cast<size_t>(r)]);
    }
  }
  void all_to_all(std::span<const std::byte> out, std::span<const size_t> out_bytes, std::span<std::byte> in,
                  std::span<const size_t> in_bytes) override {
    const Call call(watch_, std::max(out.size(), in.size()));
    inner_->all_to_all(out, out_bytes, in, in_bytes);
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      sent(r, out_bytes[static_cast<size_t>(r)]);
      received(r, in_bytes[static_cast<size_t>(r)]);
    }
  }
  void broadcast(int root, std::span<std::byte> bytes) override {
    const Call call(watch_, bytes.size() * static_cast<size_t>(size()));
    inner_->broadcast(root, bytes);
    if (rank() != root) return received(root, bytes.size());
    for (int r = 0; r < size(); ++r) {
      if (r != root) sent(r, bytes.size());
    }
  }
  void barrier() override {
    const Call call(watch_, 0);
    inner_->barrier();
  }

  std::unique_ptr<Communicator> split(int colour, int key) override {
    const Call call(watch_, 0);
    std::unique_ptr<Communicator> part = inner_->split(colour, key);
    const int32_t own = names_[static_cast<size_t>(rank())];
    std::vector<int32_t> names(static_cast<size_t>(part->size()));
    const std::vector<size_t> bytes(names.size(), sizeof(own));
    part->all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(names)), bytes);
    return std::make_unique<WatchedCommunicator>(std::move(part), watch_, std::move(names));
  }
  Traffic traffic() const override { return inner_->traffic(); }

 private:
  class Call {
   public:
    Call(Watch& watch, size_t bytes) : watch_(watch) {
      const double rate = watch_.slowest_bytes_per_s.load(std::memory_order_relaxed);
      const double moving_s = rate > 0 ? 2 * static_cast<double>(bytes) / rate : 0;
      watch_.waiting_since_ns.store(now_ns() + static_cast<int64_t>(moving_s * 1e9),
                                    std::memory_order_relaxed);
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

  size_t name_of(int rank) const { return static_cast<size_t>(names_[static_cast<size_t>(rank)]); }
  void sent(int to, size_t bytes) { add(watch_.sent[name_of(to)], bytes); }
  void received(int from, size_t bytes) { add(watch_.received[name_of(from)], bytes); }

  std::unique_ptr<Communicator> inner_;
  Watch& watch_;
  const std::vector<int32_t> names_;
};

}  // namespace

double Watch::waiting_s() const {
  const int64_t since = waiting_since_ns.load(std::memory_order_relaxed);
  return since == 0 ? 0.0 : std::max(0.0, static_cast<double>(now_ns() - since) * 1e-9);
}

bool Watch::moving() const { return waiting_since_ns.load(std::memory_order_relaxed) > now_ns(); }

std::unique_ptr<Communicator> make_watched(std::unique_ptr<Communicator> inner, Watch& watch) {
  std::vector<int32_t> names(static_cast<size_t>(inner->size()));
  std::iota(names.begin(), names.end(), 0);
  return std::make_unique<WatchedCommunicator>(std::move(inner), watch, std::move(names));
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
      const double slowest = watch.slowest_bytes_per_s.load(std::memory_order_relaxed);
      if (slowest == 0 || speed.bytes_per_s < slowest) {
        watch.slowest_bytes_per_s.store(speed.bytes_per_s, std::memory_order_relaxed);
      }
    }
  }
}

}  // namespace millrace::dist
