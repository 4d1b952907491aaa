// The pool under what it will meet: very short loops, bodies that throw, more threads than cores, idleness.
// Run it with the tsan preset as well.
#include "base/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

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

// An idle pool sleeps: CPU time over 200 ms of idleness is a small part of it.
TEST(ThreadPool, IdlePoolUsesNoCpu) {
  ThreadPool pool(4);
  pool.parallel_for(100, 1, [](int64_t, int64_t, int) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // time to fall asleep, on a busy machine too
  const auto cpu_time = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
  };
  const double before = cpu_time();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_LT(cpu_time() - before, 0.05);
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

// Workers of the second node (threads 2 and 3) begin in the second half, every time; who is done helps the
// others.
TEST(ThreadPool, EachNodeBeginsWithItsPart) {
  ThreadPool pool(4, kTwoNodes);
  int own = 0, loops = 0;
  for (int loop = 0; loop < 200; ++loop) {
    std::array<std::atomic<int64_t>, 4> first{-1, -1, -1, -1};
    pool.parallel_for(40, 1, [&](int64_t begin, int64_t, int thread) {
      int64_t none = -1;
      first[thread].compare_exchange_strong(none, begin);
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    });
    for (int thread : {2, 3}) {
      if (first[thread] < 0) continue;
      ++loops;
      own += first[thread] >= 20;
    }
  }
  EXPECT_GT(loops, 0);
  EXPECT_GT(own, loops * 3 / 4);  // a worker that comes when its part is done begins elsewhere
}

// A node whose threads hang in their first chunk does not keep the rest of its part from being done.
TEST(ThreadPool, OthersFinishTheWorkOfASlowNode) {
  ThreadPool pool(4, kTwoNodes);
  std::array<std::atomic<int>, 4> done{};
  pool.parallel_for(400, 1, [&](int64_t, int64_t, int thread) {
    ++done[thread];
    std::this_thread::sleep_for(thread >= 2 ? std::chrono::milliseconds(60) : std::chrono::microseconds(50));
  });
  EXPECT_EQ(done[0] + done[1] + done[2] + done[3], 400);
  EXPECT_GT(done[0] + done[1], 250);  // their own 200 and most of the others'
}

// A neighbour that takes most of one core away costs its share of the work, not half the speed: the thread
// there does little, the other the rest.
TEST(ThreadPool, AStolenCoreTakesFewChunks) {
  ThreadPool pool(2);
  std::array<std::atomic<int>, 2> done{};
  pool.parallel_for(200, 1, [&](int64_t, int64_t, int thread) {
    ++done[thread];
    std::this_thread::sleep_for(thread == 1 ? std::chrono::milliseconds(20) : std::chrono::microseconds(200));
  });
  EXPECT_EQ(done[0] + done[1], 200);
  EXPECT_LT(done[1], 60);
}

}  // namespace
}  // namespace millrace
