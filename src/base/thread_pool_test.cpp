// The pool under what it will meet: very short loops, bodies that throw, more threads than cores, idleness.
// Run it with the tsan preset as well.
#include "base/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

namespace millrace {
namespace {

// Every index once, whatever the chunk; plain memory written by workers is visible to the caller.
TEST(ThreadPool, CoversEveryIndexOnce) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    ASSERT_EQ(pool.size(), threads);
    for (int64_t count : {0, 1, 2, 7, 100, 1000}) {
      for (int64_t chunk : {1, 3, 64, 5000}) {
        std::vector<int> hits(static_cast<size_t>(count), 0);
        std::vector<int> thread_of(hits.size(), -1);
        pool.parallel_for(count, chunk, [&](int64_t begin, int64_t end, int thread) {
          ASSERT_LT(begin, end);
          for (int64_t i = begin; i < end; ++i) {
            ++hits[i];
            thread_of[i] = thread;
          }
        });
        for (int64_t i = 0; i < count; ++i) {
          ASSERT_EQ(hits[i], 1);
          ASSERT_TRUE(thread_of[i] >= 0 && thread_of[i] < threads);
        }
      }
    }
  }
}

// Loops that are over before a worker wakes, with pauses long enough for workers to fall asleep now and then.
TEST(ThreadPool, ManyShortLoops) {
  ThreadPool pool(3);
  int64_t total = 0;
  std::vector<int64_t> parts(4);
  for (int loop = 0; loop < 5000; ++loop) {
    pool.parallel_for(4, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) parts[i] = loop + i;
    });
    for (int64_t p : parts) total += p;
    if (loop % 1000 == 999) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(total, 4 * (5000LL * 4999 / 2) + 5000 * 6);
}

TEST(ThreadPool, RethrowsAndGoesOn) {
  for (int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 50; ++round) {
      const auto fails = [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
          if (i % 7 == round % 7) throw std::runtime_error("body");
        }
      };
      EXPECT_THROW(pool.parallel_for(100, 1, fails), std::runtime_error);
      std::vector<int> hits(64, 0);
      pool.parallel_for(64, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) hits[i] = 1;
      });
      for (int h : hits) ASSERT_EQ(h, 1);
    }
  }
}

TEST(ThreadPool, ComesAndGoes) {
  for (int round = 0; round < 50; ++round) {
    ThreadPool pool(4);
    if (round % 2 == 0) pool.parallel_for(10, 1, [](int64_t, int64_t, int) {});
  }
}

// An idle pool sleeps: there comes a stretch of 200 ms of which CPU time is a small part. Workers that a busy
// machine holds back still have their last spins to do in the first of them.
TEST(ThreadPool, IdlePoolUsesNoCpu) {
  ThreadPool pool(4);
  pool.parallel_for(100, 1, [](int64_t, int64_t, int) {});
  pool.stay_awake();  // for a while
  const auto cpu_time = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
  };
  double least = 1;
  for (int stretch = 0; stretch < 10 && least >= 0.01; ++stretch) {
    const double before = cpu_time();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    least = std::min(least, cpu_time() - before);
  }
  EXPECT_LT(least, 0.01);
}

// Threads that are not used rest, and come back.
TEST(ThreadPool, UsesAsManyThreadsAsItIsTold) {
  ThreadPool pool(4);
  const auto taking_part = [&] {  // everybody who comes within 20 ms
    std::array<std::atomic<int>, 4> came{};
    pool.parallel_for(64, 1, [&](int64_t, int64_t, int thread) {
      came[static_cast<size_t>(thread)] = 1;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    return came[0] + came[1] + came[2] + came[3];
  };
  const auto reaches = [&](int threads) {
    for (int loop = 0; loop < 1000; ++loop) {
      if (taking_part() == threads) return true;
    }
    return false;
  };
  EXPECT_EQ(pool.used(), 4);
  EXPECT_TRUE(reaches(4));
  pool.use(2);
  EXPECT_EQ(pool.used(), 2);
  EXPECT_TRUE(reaches(2));
  for (int loop = 0; loop < 20; ++loop) EXPECT_LE(taking_part(), 2);
  pool.use(100);
  EXPECT_EQ(pool.used(), 4);
  EXPECT_TRUE(reaches(4));
  pool.use(0);
  EXPECT_TRUE(reaches(1));
}

// Two made-up nodes of CPUs that this machine may not have: two threads each.
const Topology kTwoNodes = {{0, {0, 1}}, {1, {1000, 1001}}};

TEST(ThreadPool, DealsThreadsToNodes) {
  EXPECT_EQ(ThreadPool(4, kTwoNodes).nodes(), 2);
  EXPECT_EQ(ThreadPool(1, kTwoNodes).nodes(), 1);
  EXPECT_EQ(ThreadPool(3, Topology{{0, {0}}, {3, {1}}, {7, {2}}}).nodes(), 3);
  EXPECT_EQ(ThreadPool(2, Topology{{0, {}}}).nodes(), 1);
}

TEST(ThreadPool, CoversEveryIndexOnceOnSeveralNodes) {
  for (int threads : {2, 3, 5, 8}) {
    ThreadPool pool(threads, {{0, {0}}, {1, {1, 2, 3}}, {2, {4, 5}}});
    for (int64_t count : {2, 7, 100, 1000}) {
      for (int64_t chunk : {1, 3, 64}) {
        std::vector<std::atomic<int>> hits(static_cast<size_t>(count));
        pool.parallel_for(count, chunk, [&](int64_t begin, int64_t end, int) {
          if (count > chunk) {
            EXPECT_EQ(begin % chunk, 0);
          }
          for (int64_t i = begin; i < end; ++i) ++hits[i];
        });
        for (const auto& hit : hits) ASSERT_EQ(hit.load(), 1);
      }
    }
  }
}

// Waits for what another thread will do; false when it has not come after a minute.
template <class Condition>
bool comes(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

// Workers of the second node (threads 2 and 3) begin in the second half, every time. Nobody goes on before
// everybody has begun: a worker that comes when its part is done begins elsewhere, and rightly.
TEST(ThreadPool, EachNodeBeginsWithItsPart) {
  ThreadPool pool(4, kTwoNodes);
  for (int loop = 0; loop < 50; ++loop) {
    std::array<std::atomic<int64_t>, 4> first{-1, -1, -1, -1};
    std::atomic<int> begun{0}, late{0};
    pool.parallel_for(40, 1, [&](int64_t begin, int64_t, int thread) {
      int64_t none = -1;
      if (!first[thread].compare_exchange_strong(none, begin)) return;
      ++begun;
      if (!comes([&] { return begun == 4 || late > 0; })) ++late;
    });
    ASSERT_EQ(late, 0) << "a thread did not take part in loop " << loop;
    ASSERT_LT(first[1], 20);
    ASSERT_GE(first[2], 20);
    ASSERT_GE(first[3], 20);
  }
}

// Chunks done by each thread when those from `slow` on stay in their first one until all the rest is begun. A
// failure when it never is.
std::vector<int> with_slow_threads(ThreadPool& pool, int slow, int chunks) {
  std::vector<std::atomic<int>> done(static_cast<size_t>(pool.size()));
  std::atomic<int> begun{0}, late{0};
  pool.parallel_for(chunks, 1, [&](int64_t, int64_t, int thread) {
    ++done[thread];
    ++begun;
    if (thread < slow) return;
    if (!comes([&] { return begun == chunks || late > 0; })) ++late;
  });
  EXPECT_EQ(late, 0) << "chunks were kept for a thread that is busy";
  return {done.begin(), done.end()};
}

// A node whose threads hang in their first chunk does not keep the rest of its part from being done.
TEST(ThreadPool, OthersFinishTheWorkOfASlowNode) {
  ThreadPool pool(4, kTwoNodes);
  const std::vector<int> done = with_slow_threads(pool, 2, 400);
  EXPECT_EQ(done[0] + done[1] + done[2] + done[3], 400);
  EXPECT_LE(done[2], 1);
  EXPECT_LE(done[3], 1);
}

// A neighbour that takes one core away costs its share of the work, not half the speed: the thread there does
// little, the other the rest.
TEST(ThreadPool, AStolenCoreTakesFewChunks) {
  ThreadPool pool(2);
  const std::vector<int> done = with_slow_threads(pool, 1, 200);
  EXPECT_EQ(done[0] + done[1], 200);
  EXPECT_LE(done[1], 1);
}

// Every part once; whoever takes the part of its own number takes it first; what a thread was told that it
// would take, it takes or another does.
TEST(ThreadPool, PartsAreTakenOnceAndAsAnnounced) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 200; ++round) {
      for (int64_t count : {0, 1, 2, 7, 8, 9, 60}) {
        std::vector<std::atomic<int>> hits(static_cast<size_t>(count));
        std::vector<int64_t> announced(static_cast<size_t>(threads), -1);
        std::atomic<int> wrong{0};
        pool.parallel_parts(count, [&](const LoopPart& part, int thread) {
          ++hits[part.index];
          if (part.prefetched && announced[thread] != part.index) ++wrong;
          if (part.next >= count || part.next == part.index) ++wrong;
          announced[thread] = part.next;
        });
        ASSERT_EQ(wrong, 0);
        for (const std::atomic<int>& h : hits) ASSERT_EQ(h, 1);
      }
    }
  }
}

// A thread that hangs in a part keeps that one alone: what it had before it is done by others.
TEST(ThreadPool, PartsOfASlowThreadAreTaken) {
  constexpr int kParts = 200;
  ThreadPool pool(3);
  std::atomic<int> done{0}, late{0};
  std::array<std::atomic<int>, 3> by{};
  pool.parallel_parts(kParts, [&](const LoopPart&, int thread) {
    ++done;
    if (++by[thread] == 1 && !comes([&] { return by[1] > 0; })) ++late;  // all begin together
    if (thread == 1 && !comes([&] { return done == kParts || late > 0; })) ++late;
  });
  EXPECT_EQ(late, 0) << "parts were kept for a thread that is busy";
  EXPECT_EQ(done, kParts);
  EXPECT_LE(by[1], 1);
}

TEST(ThreadPool, PartsRethrowAndGoOn) {
  ThreadPool pool(4);
  for (int round = 0; round < 50; ++round) {
    const auto fails = [&](const LoopPart& part, int) {
      if (part.index % 7 == round % 7) throw std::runtime_error("body");
    };
    EXPECT_THROW(pool.parallel_parts(100, fails), std::runtime_error);
    std::atomic<int> hits{0};
    pool.parallel_parts(64, [&](const LoopPart&, int) { ++hits; });
    ASSERT_EQ(hits, 64);
  }
}

// What is read first later is only prefetched: it need not be there, and a pool that waits for it still falls
// asleep.
TEST(ThreadPool, PrefetchesMemoryThatIsNotThere) {
  ThreadPool pool(3);
  FirstReads reads;
  reads.count = 1;
  reads.data[0] = reinterpret_cast<const std::byte*>(uintptr_t{4096});
  reads.stride = reads.bytes = int64_t{1} << 30;
  for (int loop = 0; loop < 200; ++loop) {
    pool.prefetch_while_waiting(loop % 3 == 0 ? FirstReads{} : reads);
    std::atomic<int> hits{0};
    pool.parallel_parts(5, [&](const LoopPart&, int) { ++hits; });
    ASSERT_EQ(hits, 5);
    if (loop % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace
}  // namespace millrace
