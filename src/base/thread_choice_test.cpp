// How many threads are used where nobody says so, on made-up processors.
#include "base/thread_choice.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>

namespace millrace {
namespace {

class MadeUpProcessors : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::temp_directory_path() / ("millrace_threads_" + std::to_string(::getpid()));
    std::filesystem::remove_all(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void write(int cpu, const std::string& name, const std::string& text) {
    const std::filesystem::path file = root_ / ("cpu" + std::to_string(cpu)) / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  CoreCounts read(const std::vector<int>& allowed) { return read_cores(root_.string(), allowed); }
  std::filesystem::path root_;
};
using Counts = std::vector<int>;
Counts counts(const CoreCounts& c) { return {c.cpus, c.cores, c.fast_cores}; }

TEST_F(MadeUpProcessors, NothingIsKnown) {
  EXPECT_EQ(counts(read({0, 1, 2, 3})), (Counts{4, 4, 4}));
  EXPECT_EQ(counts(read({})), (Counts{1, 1, 1}));
}

TEST_F(MadeUpProcessors, Hyperthreads) {
  for (int cpu = 0; cpu < 8; ++cpu)
    write(cpu, "topology/thread_siblings_list", std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4));
  EXPECT_EQ(counts(read({0, 1, 2, 3, 4, 5, 6, 7})), (Counts{8, 4, 4}));
  EXPECT_EQ(counts(read({0, 1, 4, 6})), (Counts{4, 3, 3}));  // 0 and 4 share a core
  EXPECT_EQ(counts(read({6, 7})), (Counts{2, 2, 2}));
}

// Two fast cores of two threads, four slow ones, by clock; the second fast one is clocked a little higher.
TEST_F(MadeUpProcessors, EfficiencyCores) {
  for (int cpu = 0; cpu < 8; ++cpu) {
    write(cpu, "topology/thread_siblings_list", cpu < 4 ? (cpu < 2 ? "0-1" : "2-3") : std::to_string(cpu));
    write(cpu, "cpufreq/cpuinfo_max_freq", cpu < 2 ? "5100000" : cpu < 4 ? "5300000" : "3900000");
  }
  EXPECT_EQ(counts(read({0, 1, 2, 3, 4, 5, 6, 7})), (Counts{8, 6, 2}));
  EXPECT_EQ(counts(read({4, 5, 6, 7, 0})), (Counts{5, 5, 1}));  // slow ones first
  EXPECT_EQ(counts(read({4, 5})), (Counts{2, 2, 2}));
}

TEST_F(MadeUpProcessors, CapacityComesBeforeClock) {
  for (int cpu = 0; cpu < 4; ++cpu) {
    write(cpu, "cpu_capacity", cpu < 3 ? "446" : "1024");
    write(cpu, "cpufreq/cpuinfo_max_freq", "2000000");
  }
  EXPECT_EQ(counts(read({0, 1, 2, 3})), (Counts{4, 4, 1}));
}

TEST(ThreadChoice, Candidates) {
  EXPECT_EQ(thread_candidates({16, 8, 8}, 0), (Counts{8, 16}));
  EXPECT_EQ(thread_candidates({20, 14, 6}, 0), (Counts{6, 14, 20}));
  EXPECT_EQ(thread_candidates({2, 2, 2}, 0), (Counts{2}));
  EXPECT_EQ(thread_candidates({16, 8, 8}, 4), (Counts{4}));
  EXPECT_EQ(thread_candidates({16, 8, 8}, 2.5), (Counts{2, 3}));
  EXPECT_EQ(thread_candidates({16, 8, 8}, 12), (Counts{8, 12}));
  EXPECT_EQ(thread_candidates({16, 8, 8}, 0.25), (Counts{1}));
  EXPECT_EQ(thread_candidates({4, 4, 4}, 64), (Counts{4}));
}

TEST(ThreadChoice, TheFewestThatAreAsGoodAsTheBest) {
  std::map<int, double> speeds = {{8, 41.2e9}, {16, 41.5e9}};
  const auto speed = [&](int threads) { return speeds.at(threads); };
  EXPECT_EQ(choose_threads({8, 16}, speed).threads, 8);
  EXPECT_EQ(choose_threads({8, 16}, speed).note, "8 threads: 8 read 41.2 GB/s, 16 read 41.5 GB/s");
  speeds[16] = 50e9;
  EXPECT_EQ(choose_threads({8, 16}, speed).threads, 16);
  speeds[8] = speeds[16] = 0;  // nothing could be measured
  EXPECT_EQ(choose_threads({8, 16}, speed).threads, 16);
}

TEST(ThreadChoice, OneCandidateIsNotMeasured) {
  const ThreadChoice choice = choose_threads({3}, [](int) -> double {
    ADD_FAILURE() << "measured";
    return 0;
  });
  EXPECT_EQ(choice.threads, 3);
  EXPECT_TRUE(choice.note.empty());
}

TEST(ThreadChoice, ReadingIsMeasured) {
  for (const bool quota : {false, true}) {
    const ReadSpeed speed = read_speed(machine_topology(), quota);
    EXPECT_GT(speed(1), 0);
    const ThreadChoice choice = choose_threads({1, 2}, speed);
    EXPECT_TRUE(choice.threads == 1 || choice.threads == 2);
    EXPECT_NE(choice.note.find("GB/s"), std::string::npos);
  }
}

TEST(ThreadChoice, OfThisMachine) {
  const ThreadChoice choice = choose_threads(machine_topology());
  EXPECT_GE(choice.threads, 1);
  EXPECT_LE(choice.threads, static_cast<int>(allowed_cpus().size()));
}

}  // namespace
}  // namespace millrace
