#include "base/buffer_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

namespace millrace {
namespace {

struct Held {
  std::byte* at;
  size_t bytes;
  unsigned char mark;
};

bool intact(const Held& held) {
  return std::all_of(held.at, held.at + held.bytes,
                     [&](std::byte b) { return b == static_cast<std::byte>(held.mark); });
}

TEST(BufferPool, RandomBuffersNeverOverlapAndAllComesBack) {
  BufferPool pool;
  std::mt19937 random(3);
  std::vector<Held> held;
  for (int i = 0; i < 20000; ++i) {
    if (held.size() < 200 && random() % 2 == 0) {
      // Sizes over all paths: classes, buddies, beyond a region.
      const int kind = static_cast<int>(random() % 100);
      const size_t bytes = kind < 80   ? 1 + random() % 20000
                           : kind < 99 ? 1 + random() % 300000
                                       : (size_t{33} << 20);
      Held h{static_cast<std::byte*>(pool.allocate(bytes)), bytes,
             static_cast<unsigned char>(random() % 255 + 1)};
      ASSERT_EQ(reinterpret_cast<uintptr_t>(h.at) % (bytes < 256 ? 16 : 64), 0u);
      std::memset(h.at, h.mark, std::min<size_t>(bytes, 30000));  // enough to be seen, quick to check
      held.push_back(h);
    } else if (!held.empty()) {
      const size_t at = random() % held.size();
      Held shown = held[at];
      shown.bytes = std::min<size_t>(shown.bytes, 30000);
      ASSERT_TRUE(intact(shown));
      pool.release(held[at].at, held[at].bytes);
      held[at] = held.back();
      held.pop_back();
    }
  }
  for (const Held& h : held) pool.release(h.at, h.bytes);
  const BufferPoolStats stats = pool.stats();
  EXPECT_EQ(stats.in_use, 0u);
  EXPECT_GT(stats.peak, size_t{1} << 20);
  EXPECT_LE(stats.reserved - stats.free, 33 * (size_t{64} << 10))
      << "at most one empty slab of each class is kept";
}

TEST(BufferPool, BuddiesBecomeWholeAgain) {
  BufferPool pool;
  std::vector<void*> pages;
  for (int i = 0; i < 512; ++i) pages.push_back(pool.allocate(size_t{64} << 10));
  EXPECT_EQ(pool.stats().reserved, BuddyAllocator::kRegion);
  for (size_t i = 0; i < pages.size(); i += 2) pool.release(pages[i], size_t{64} << 10);
  const BufferPoolStats half = pool.stats();
  EXPECT_EQ(half.largest_free, size_t{64} << 10);
  EXPECT_GT(half.fragmentation(), 0.99);
  for (size_t i = 1; i < pages.size(); i += 2) pool.release(pages[i], size_t{64} << 10);
  const BufferPoolStats whole = pool.stats();
  EXPECT_EQ(whole.largest_free, BuddyAllocator::kRegion);
  EXPECT_EQ(whole.fragmentation(), 0.0);
  EXPECT_EQ(whole.system_calls, 1u);
}

// What is beyond the last page is free, and everything becomes whole again in any order of giving back.
TEST(BufferPool, LargeBuffersTakeThePagesTheyNeed) {
  std::mt19937 random(5);
  BuddyAllocator buddies;
  std::vector<std::pair<void*, size_t>> held;
  size_t used = 0;
  for (const size_t pages : {5000u, 1000u, 1u, 3u, 777u, 64u, 900u}) {
    const size_t bytes = pages * BuddyAllocator::kPage - random() % BuddyAllocator::kPage;
    held.emplace_back(buddies.allocate(bytes), bytes);
    used += pages * BuddyAllocator::kPage;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(held.back().first) % BuddyAllocator::kPage, 0u);
    EXPECT_EQ(buddies.reserved() - buddies.free_bytes(), used);
  }
  EXPECT_EQ(buddies.reserved(), BuddyAllocator::kRegion) << "7,745 of 8,192 pages fit one region";
  std::shuffle(held.begin(), held.end(), random);
  for (const auto& [run, bytes] : held) buddies.release(run, bytes);
  EXPECT_EQ(buddies.free_bytes(), BuddyAllocator::kRegion);
  EXPECT_EQ(buddies.largest_free(), BuddyAllocator::kRegion);
}

TEST(BufferPool, ZeroedIsZeroWhateverWasThereBefore) {
  BufferPool pool;
  for (const size_t bytes : {size_t{100}, size_t{100000}, size_t{33} << 20}) {
    for (int round = 0; round < 2; ++round) {
      auto* buffer = static_cast<std::byte*>(pool.allocate_zeroed(bytes));
      EXPECT_TRUE(std::all_of(buffer, buffer + bytes, [](std::byte b) { return b == std::byte{0}; }));
      std::memset(buffer, 0xff, bytes);
      pool.release(buffer, bytes);
    }
  }
}

TEST(BufferPool, SteadyStateAsksTheSystemForNothing) {
  BufferPool pool;
  const auto round = [&] {
    std::vector<std::pair<void*, size_t>> held;
    for (size_t i = 1; i < 200; ++i) held.emplace_back(pool.allocate(97 * i), 97 * i);
    for (const auto& [buffer, bytes] : held) pool.release(buffer, bytes);
  };
  round();
  const uint64_t before = pool.stats().system_calls;
  for (int i = 0; i < 50; ++i) round();
  EXPECT_EQ(pool.stats().system_calls, before);
}

TEST(BufferPool, RoundingLosesAtMostAFifth) {
  for (const size_t bytes : {65u, 81u, 129u, 1025u, 5121u, 16384u}) {
    BufferPool fresh;
    void* buffer = fresh.allocate(bytes);
    EXPECT_GE(fresh.stats().in_use, bytes);
    EXPECT_LE(static_cast<double>(fresh.stats().in_use), 1.25 * static_cast<double>(bytes));
    fresh.release(buffer, bytes);
  }
}

TEST(BufferPool, ThreadsShareIt) {
  BufferPool pool;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      for (size_t i = 1; i < 2000; ++i) {
        auto* buffer = static_cast<std::byte*>(pool.allocate(i));
        std::memset(buffer, t, i);
        pool.release(buffer, i);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool.stats().in_use, 0u);
}

}  // namespace
}  // namespace millrace
