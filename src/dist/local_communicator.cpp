#include "dist/local_communicator.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "base/check.h"
#include "base/error.h"
#include "dist/point_to_point.h"

namespace millrace::dist {
namespace {

// What ranks of a group share: a mailbox for every pair.
class Mailboxes {
 public:
  explicit Mailboxes(int ranks) : ranks_(ranks), left_(static_cast<size_t>(ranks)), boxes_(box(ranks, 0)) {}

  void put(int from, int to, std::span<const std::byte> bytes) {
    {
      const std::lock_guard lock(mutex_);
      if (left_[static_cast<size_t>(to)]) throw_left(to);
      boxes_[box(from, to)].emplace_back(bytes.begin(), bytes.end());
    }
    arrived_.notify_all();
  }

  void take(int from, int to, std::span<std::byte> bytes) {
    std::unique_lock lock(mutex_);
    auto& mail = boxes_[box(from, to)];
    arrived_.wait(lock, [&] { return !mail.empty() || left_[static_cast<size_t>(from)]; });
    if (mail.empty()) throw_left(from);
    MILLRACE_CHECK(mail.front().size() == bytes.size());
    std::copy(mail.front().begin(), mail.front().end(), bytes.begin());
    mail.pop_front();
  }

  void leave(int rank) {
    {
      const std::lock_guard lock(mutex_);
      left_[static_cast<size_t>(rank)] = true;
    }
    arrived_.notify_all();
  }

  // The group that ranks of one colour share; `split` says which of this group's splits it is.
  std::shared_ptr<Mailboxes> part(uint64_t split, int colour, int ranks) {
    const std::lock_guard lock(mutex_);
    std::weak_ptr<Mailboxes>& known = parts_[{split, colour}];
    std::shared_ptr<Mailboxes> boxes = known.lock();
    if (boxes == nullptr) known = boxes = std::make_shared<Mailboxes>(ranks);
    return boxes;
  }

 private:
  size_t box(int from, int to) const {
    return static_cast<size_t>(from) * static_cast<size_t>(ranks_) + static_cast<size_t>(to);
  }
  [[noreturn]] void throw_left(int rank) const {
    throw_error(ErrorCode::kDevice, "rank {} of {} has left the group", rank, ranks_);
  }

  const int ranks_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<bool> left_;
  std::vector<std::deque<std::vector<std::byte>>> boxes_;  // [from][to]
  std::map<std::pair<uint64_t, int>, std::weak_ptr<Mailboxes>> parts_;
};

class LocalCommunicator final : public PointToPoint {
 public:
  LocalCommunicator(std::shared_ptr<Mailboxes> boxes, int rank, int size)
      : boxes_(std::move(boxes)), rank_(rank), size_(size) {}
  ~LocalCommunicator() override { boxes_->leave(rank_); }
  LocalCommunicator(const LocalCommunicator&) = delete;
  LocalCommunicator& operator=(const LocalCommunicator&) = delete;

  std::string_view name() const override { return "local"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void send(int to, std::span<const std::byte> bytes) override {
    MILLRACE_CHECK(to >= 0 && to < size_);
    boxes_->put(rank_, to, bytes);
    traffic_.bytes_sent += bytes.size();
    ++traffic_.calls;
  }
  void recv(int from, std::span<std::byte> bytes) override {
    MILLRACE_CHECK(from >= 0 && from < size_);
    boxes_->take(from, rank_, bytes);
    traffic_.bytes_received += bytes.size();
    ++traffic_.calls;
  }
  void send_recv(int to, std::span<const std::byte> out, int from, std::span<std::byte> in) override {
    send(to, out);
    recv(from, in);
    --traffic_.calls;
  }

  std::unique_ptr<Communicator> split(int colour, int key) override {
    struct Wish {
      int colour, key, rank;
    };
    const Wish mine{colour, key, rank_};
    std::vector<Wish> wishes(static_cast<size_t>(size_));
    const std::vector<size_t> bytes(wishes.size(), sizeof(Wish));
    all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(wishes)), bytes);
    std::erase_if(wishes, [&](const Wish& w) { return w.colour != colour; });
    std::stable_sort(wishes.begin(), wishes.end(),
                     [](const Wish& a, const Wish& b) { return a.key < b.key; });
    const auto own =
        std::find_if(wishes.begin(), wishes.end(), [&](const Wish& w) { return w.rank == rank_; });
    const auto ranks = static_cast<int>(wishes.size());
    auto part = std::make_unique<LocalCommunicator>(boxes_->part(splits_++, colour, ranks),
                                                    static_cast<int>(own - wishes.begin()), ranks);
    barrier();  // nobody's part goes before all who share it have it
    return part;
  }

  Traffic traffic() const override { return traffic_; }

 private:
  std::shared_ptr<Mailboxes> boxes_;
  const int rank_, size_;
  uint64_t splits_ = 0;
  Traffic traffic_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_local_group(int ranks) {
  if (ranks < 1) throw_error(ErrorCode::kBadInput, "ranks: found {}, expected at least 1", ranks);
  const auto boxes = std::make_shared<Mailboxes>(ranks);
  std::vector<std::unique_ptr<Communicator>> group;
  for (int r = 0; r < ranks; ++r) group.push_back(std::make_unique<LocalCommunicator>(boxes, r, ranks));
  return group;
}

}  // namespace millrace::dist
