// The pool under what it will meet: very short loops, bodies that throw, more threads than cores, idleness.
// Run it with the tsan preset as well.
#include "base/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <stdexcept>
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

TEST(ThreadPool, KnowsItsCpus) { EXPECT_GE(available_cpus(), 1); }

// A made-up /sys/fs/cgroup.
class CgroupTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::temp_directory_path() / ("millrace_cgroup_" + std::to_string(::getpid()));
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void write(const std::string& name, const std::string& text) {
    std::filesystem::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << text;
  }
  double cpus() { return cgroup_cpus((root_ / "groups").string(), root_.string()); }
  std::filesystem::path root_;
};

TEST_F(CgroupTest, NoLimit) {
  EXPECT_EQ(cpus(), 0);  // nothing mounted
  write("groups", "0::/a/b\n");
  write("a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(cpus(), 0);
  write("groups", "nonsense\n4:cpu\n0::../../etc\n");
  EXPECT_EQ(cpus(), 0);
}

TEST_F(CgroupTest, VersionTwoTakesTheTightestLevel) {
  write("groups", "0::/a/b\n");
  write("a/b/cpu.max", "400000 100000\n");
  EXPECT_EQ(cpus(), 4);
  write("a/cpu.max", "150000 100000\n");
  EXPECT_EQ(cpus(), 1.5);
  write("cpu.max", "50000 100000\n");
  EXPECT_EQ(cpus(), 0.5);
}

TEST_F(CgroupTest, VersionOne) {
  write("groups", "5:memory:/a\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n");
  write("cpu,cpuacct/docker/x/cpu.cfs_quota_us", "300000\n");
  write("cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpus(), 3);
  write("cpu,cpuacct/docker/x/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(cpus(), 0);
}

}  // namespace
}  // namespace millrace
