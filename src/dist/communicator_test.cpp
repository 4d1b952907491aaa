// Every kind of communicator against what plain loops over all ranks' data say.
#include "dist/communicator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "dist/delayed_communicator.h"
#include "dist/local_communicator.h"
#include "dist/watched_communicator.h"
#include "millrace/error.h"

namespace millrace::dist {
namespace {

using Body = std::function<void(Communicator&)>;

// Runs `body` on a thread per rank; the first exception of a rank is thrown here.
void on_ranks(std::vector<std::unique_ptr<Communicator>> group, const Body& body) {
  std::vector<std::thread> threads;
  std::exception_ptr fault;
  std::mutex mutex;
  for (auto& member : group) {
    threads.emplace_back([&, c = member.get()] {
      try {
        body(*c);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (fault == nullptr) fault = std::current_exception();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  if (fault != nullptr) std::rethrow_exception(fault);
}

std::vector<std::unique_ptr<Communicator>> delayed_group(int ranks, const LinkDelay& delay) {
  auto group = make_local_group(ranks);
  for (auto& c : group) c = make_delayed(std::move(c), delay);
  return group;
}

class Communicators : public testing::TestWithParam<std::pair<int, bool>> {
 protected:
  void run(const Body& body) {
    const auto [ranks, delayed] = GetParam();
    on_ranks(delayed ? delayed_group(ranks, {1e-5, 1e9}) : make_local_group(ranks), body);
  }
};

std::vector<uint8_t> pattern(int rank, size_t bytes) {
  std::vector<uint8_t> values(bytes);
  for (size_t i = 0; i < bytes; ++i)
    values[i] = static_cast<uint8_t>(static_cast<size_t>(rank) * 37 + i * 11);
  return values;
}

TEST_P(Communicators, GatherUnevenParts) {
  run([](Communicator& c) {
    std::vector<size_t> bytes;
    std::vector<uint8_t> expected;
    for (int r = 0; r < c.size(); ++r) {
      bytes.push_back(static_cast<size_t>((r * 7) % 5) * 3);  // rank 0 has nothing
      const auto part = pattern(r, bytes.back());
      expected.insert(expected.end(), part.begin(), part.end());
    }
    const auto mine = pattern(c.rank(), bytes[static_cast<size_t>(c.rank())]);
    std::vector<uint8_t> all(expected.size());
    c.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)), bytes);
    EXPECT_EQ(all, expected);
    // All but this rank's part came in; this rank's went to everybody else.
    const Traffic t = c.traffic();
    EXPECT_EQ(t.bytes_received, expected.size() - mine.size());
    EXPECT_EQ(t.bytes_sent, mine.size() * static_cast<size_t>(c.size() - 1));
  });
}

TEST_P(Communicators, AllToAllIsATransposition) {
  run([](Communicator& c) {
    // Rank a sends rank b (a + 2 b) % 4 bytes.
    const auto count = [](int a, int b) { return static_cast<size_t>((a + 2 * b) % 4); };
    std::vector<size_t> out_bytes, in_bytes;
    std::vector<uint8_t> out, expected;
    for (int r = 0; r < c.size(); ++r) {
      out_bytes.push_back(count(c.rank(), r));
      in_bytes.push_back(count(r, c.rank()));
      const auto to = pattern(100 * c.rank() + r, out_bytes.back());
      out.insert(out.end(), to.begin(), to.end());
      const auto from = pattern(100 * r + c.rank(), in_bytes.back());
      expected.insert(expected.end(), from.begin(), from.end());
    }
    std::vector<uint8_t> in(expected.size());
    c.all_to_all(std::as_bytes(std::span(out)), out_bytes, std::as_writable_bytes(std::span(in)), in_bytes);
    EXPECT_EQ(in, expected);
  });
}

TEST_P(Communicators, BroadcastFromEveryRoot) {
  run([](Communicator& c) {
    for (int root = 0; root < c.size(); ++root) {
      auto bytes = pattern(c.rank(), 33);
      c.broadcast(root, std::as_writable_bytes(std::span(bytes)));
      EXPECT_EQ(bytes, pattern(root, 33));
    }
    EXPECT_EQ(broadcast_text(c, c.size() - 1, std::to_string(c.rank())), std::to_string(c.size() - 1));
  });
}

// Values whose sum depends on the order, so that another order would be seen.
TEST_P(Communicators, SumsAreInRankOrder) {
  const auto value = [](int rank, size_t i) {
    return std::ldexp(1.0f + static_cast<float>(i), (rank * 13 + static_cast<int>(i)) % 29) *
           (rank % 2 ? -1.0f : 1.0f);
  };
  run([&](Communicator& c) {
    constexpr size_t kCount = 21;
    std::vector<float> mine(kCount), expected(kCount);
    for (size_t i = 0; i < kCount; ++i) {
      mine[i] = value(c.rank(), i);
      expected[i] = value(0, i);
      for (int r = 1; r < c.size(); ++r) expected[i] += value(r, i);
    }
    std::vector<size_t> counts(static_cast<size_t>(c.size()), 0);
    counts[0] = 5;
    counts.back() += kCount - 5;
    std::vector<float> part(counts[static_cast<size_t>(c.rank())]);
    c.reduce_scatter(mine, counts, part);
    const size_t begin = c.rank() == 0 ? 0 : 5;
    for (size_t i = 0; i < part.size(); ++i) EXPECT_EQ(part[i], expected[begin + i]);
    c.all_reduce(mine);
    EXPECT_EQ(mine, expected);
  });
}

TEST_P(Communicators, RingOfMessagesAndBarrier) {
  run([](Communicator& c) {
    std::vector<uint8_t> held = pattern(c.rank(), 100), next(100);
    for (int s = 0; s < c.size(); ++s) {
      c.send_recv((c.rank() + 1) % c.size(), std::as_bytes(std::span(held)),
                  (c.rank() + c.size() - 1) % c.size(), std::as_writable_bytes(std::span(next)));
      held.swap(next);
    }
    EXPECT_EQ(held, pattern(c.rank(), 100));  // once around
    c.barrier();
  });
}

TEST_P(Communicators, SplitByColourInOrderOfKeys) {
  run([](Communicator& c) {
    const auto part = c.split(c.rank() % 2, -c.rank());
    const int members = (c.size() + 1 - c.rank() % 2) / 2;
    ASSERT_EQ(part->size(), members);
    EXPECT_EQ(part->rank(), members - 1 - c.rank() / 2);  // the highest rank has the lowest key
    float value = static_cast<float>(c.rank());
    part->all_reduce({&value, 1});
    float expected = 0;
    for (int r = c.rank() % 2; r < c.size(); r += 2) expected += static_cast<float>(r);
    EXPECT_EQ(value, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, Communicators,
                         testing::Values(std::pair(1, false), std::pair(2, false), std::pair(3, false),
                                         std::pair(8, false), std::pair(16, false), std::pair(3, true)));

TEST(Communicator, DisagreementNamesTheRanks) {
  try {
    on_ranks(make_local_group(4), [](Communicator& c) {
      const Claim claims[] = {{"version", "0.2.0"}, {"model file", c.rank() == 2 ? "b" : "a"}};
      check_agreement(c, claims);
    });
    FAIL() << "nobody complained";
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()),
              "model file: rank 2 of 4 has 'b', rank 0 has 'a': all ranks need the same");
  }
}

TEST(Communicator, WhoWaitsForARankThatLeftIsTold) {
  auto group = make_local_group(2);
  std::thread waits([&] {
    std::byte byte{};
    EXPECT_THROW(group[0]->recv(1, {&byte, 1}), Error);
  });
  group[1].reset();
  waits.join();
}

// No less than the link's time; more is the machine's.
TEST(Communicator, ADelayedLinkTakesAtLeastItsTime) {
  using Clock = std::chrono::steady_clock;
  constexpr size_t kBytes = 100'000;
  Clock::time_point sent, there;
  on_ranks(delayed_group(2, {2e-3, 10e6}), [&](Communicator& c) {
    std::vector<std::byte> message(kBytes);
    if (c.rank() == 0) {
      sent = Clock::now();
      c.send(1, message);
    } else {
      c.recv(0, message);
      there = Clock::now();
    }
    const LinkSpeed speed = measure_link(c, 0, 1, kBytes);
    EXPECT_GE(speed.latency_s, 2e-3);
    EXPECT_GT(speed.bytes_per_s, 0);
  });
  EXPECT_GE(std::chrono::duration<double>(there - sent).count(), 2e-3 + kBytes / 10e6);
  EXPECT_THROW(make_delayed(nullptr, {-1.0, 0}), Error);
}

// A long message over a link that was measured to be slow is not taken for one that is down.
TEST(Communicator, WhoIsWatchedWaitsOnceItsBytesShouldBeThere) {
  auto group = make_local_group(2);
  Watch watch;
  const auto waits = [&] {  // at last, however busy the machine is
    for (int i = 0; i < 6000 && watch.waiting_s() == 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return watch.waiting_s() > 0;
  };
  std::atomic<int> received = 0;  // messages that rank 0 is about to receive, and before
  group[0] = make_watched(std::move(group[0]), watch);
  on_ranks(std::move(group), [&](Communicator& c) {
    std::vector<std::byte> bytes(1 << 20), few(8);
    int sent = 0;
    for (const double rate : {0.0, 1e3, 1e9}) {  // bytes per second
      for (std::vector<std::byte>* message : {&bytes, &few}) {
        c.barrier();
        if (c.rank() == 0) {
          watch.slowest_bytes_per_s = rate;
          ++received;
          received.notify_one();
          c.recv(1, *message);
          continue;
        }
        received.wait(sent++);
        if (rate == 1e3 && message == &bytes) {  // half an hour
          std::this_thread::sleep_for(std::chrono::milliseconds(300));
          EXPECT_EQ(watch.waiting_s(), 0);
        } else {
          EXPECT_TRUE(waits()) << rate << ", " << message->size();
        }
        c.send(0, *message);
      }
    }
  });
  EXPECT_EQ(watch.waiting_s(), 0);
  group = make_local_group(2);
  Watch watches[2];
  for (auto& c : group) {
    Watch& own = watches[c->rank()];
    c = make_watched(make_delayed(std::move(c), {0, 1e7}), own);
  }
  on_ranks(std::move(group), [&](Communicator& c) { measure_links(c, watches[c.rank()]); });
  for (const Watch& measured : watches) {
    EXPECT_LE(measured.slowest_bytes_per_s, 1.01e7);
    EXPECT_GT(measured.slowest_bytes_per_s, 1e6);
  }
}

TEST(Communicator, ADelayIsMicrosecondsAndMegabits) {
  EXPECT_FALSE(parse_link_delay("delay", ""));
  const LinkDelay delay = parse_link_delay("delay", "50,1000").value();
  EXPECT_DOUBLE_EQ(delay.latency_s, 50e-6);
  EXPECT_EQ(delay.bytes_per_s, 125e6);
  EXPECT_EQ(parse_link_delay("delay", "0.5,0").value().bytes_per_s, 0);
  for (const char* bad :
       {"50", "50,", ",1000", "50,1000,", "-1,10", "1,-10", "nan,1", "1;2", "a,b", "1e99,1"}) {
    EXPECT_THROW(parse_link_delay("delay", bad), Error) << bad;
  }
}

}  // namespace
}  // namespace millrace::dist
