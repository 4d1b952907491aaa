// CPUs, memory nodes and quotas, read from made-up system files.
#include "base/topology.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

namespace millrace {
namespace {

TEST(Topology, OfThisMachine) {
  EXPECT_GE(available_cpus(), 1);
  const Topology topology = machine_topology();
  size_t cpus = 0;
  for (const MemoryNode& node : topology) cpus += node.cpus.size();
  EXPECT_EQ(cpus, allowed_cpus().size());
}

TEST(Topology, CpuLists) {
  EXPECT_EQ(parse_cpu_list("0-3,8,10-11"), (std::vector<int>{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(parse_cpu_list("5\n"), (std::vector<int>{5}));
  EXPECT_EQ(parse_cpu_list(""), (std::vector<int>{}));
  EXPECT_EQ(parse_cpu_list("1,2,x,4"), (std::vector<int>{1, 2}));
  EXPECT_EQ(parse_cpu_list("3-2"), (std::vector<int>{}));
  EXPECT_EQ(parse_cpu_list("0-99999999"), (std::vector<int>{}));
  EXPECT_EQ(parse_cpu_list("-1"), (std::vector<int>{}));
}

TEST(Topology, AThreadStaysWhereItWasPut) {
  std::thread([] {
    const std::vector<int> one = {allowed_cpus().back()};
    ASSERT_TRUE(run_on(one));
    EXPECT_EQ(allowed_cpus(), one);
    EXPECT_FALSE(run_on({}));
  }).join();
}

// A made-up /sys.
class SystemFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::temp_directory_path() / ("millrace_topology_" + std::to_string(::getpid()));
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

TEST_F(SystemFiles, NoLimit) {
  EXPECT_EQ(cpus(), 0);  // nothing mounted
  write("groups", "0::/a/b\n");
  write("a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(cpus(), 0);
  write("groups", "nonsense\n4:cpu\n0::../../etc\n");
  EXPECT_EQ(cpus(), 0);
}

TEST_F(SystemFiles, VersionTwoTakesTheTightestLevel) {
  write("groups", "0::/a/b\n");
  write("a/b/cpu.max", "400000 100000\n");
  EXPECT_EQ(cpus(), 4);
  write("a/cpu.max", "150000 100000\n");
  EXPECT_EQ(cpus(), 1.5);
  write("cpu.max", "50000 100000\n");
  EXPECT_EQ(cpus(), 0.5);
}

TEST_F(SystemFiles, VersionOne) {
  write("groups", "5:memory:/a\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n");
  write("cpu,cpuacct/docker/x/cpu.cfs_quota_us", "300000\n");
  write("cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpus(), 3);
  write("cpu,cpuacct/docker/x/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(cpus(), 0);
}

TEST_F(SystemFiles, Memory) {
  const auto memory = [&] { return cgroup_memory((root_ / "groups").string(), root_.string()); };
  EXPECT_EQ(memory(), kNoLimit);
  write("groups", "0::/a/b\n");
  write("a/b/memory.max", "max\n");
  write("a/b/memory.current", "5000\n");
  EXPECT_EQ(memory(), kNoLimit);
  write("a/memory.max", "10000\n");
  write("a/memory.current", "8000\n");
  EXPECT_EQ(memory(), 2000u);
  write("a/memory.stat", "anon 1000\nactive_file 3000\ninactive_file 1000\nunevictable 7\n");
  EXPECT_EQ(memory(), 6000u) << "cached files make room";
  write("memory.max", "100\n");
  write("memory.current", "500\n");
  EXPECT_EQ(memory(), 0u);
  std::filesystem::remove_all(root_ / "a");
  std::filesystem::remove(root_ / "memory.max");
  write("groups", "5:memory:/x/y\n");
  write("memory/x/memory.limit_in_bytes", "9000\n");
  write("memory/x/memory.usage_in_bytes", "4000\n");
  write("memory/x/memory.stat", "active_file 1\ntotal_active_file 500\n");
  EXPECT_EQ(memory(), 5500u);
}

TEST_F(SystemFiles, Caches) {
  EXPECT_EQ(largest_cache((root_ / "absent").string()), 0u);
  write("index0/size", "48K\n");
  write("index3/size", "307200K\n");
  write("index2/size", "2M\n");
  write("index4/size", "none\n");
  write("uevent", "");
  EXPECT_EQ(largest_cache(root_.string()), size_t{300} << 20);
}

TEST(Topology, BeyondCaches) {
  EXPECT_GE(beyond_caches(), size_t{512} << 20);
  EXPECT_EQ(beyond_caches() % (size_t{1} << 20), 0u);
}

TEST_F(SystemFiles, Nodes) {
  const std::string root = root_.string();
  Topology one = read_topology(root + "/absent", {0, 5});
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0].cpus, (std::vector<int>{0, 5}));
  write("node1/cpulist", "2-3,6\n");
  write("node0/cpulist", "0-1,4-5\n");
  write("node10/cpulist", "\n");  // memory without CPUs
  write("node2/cpulist", "7\n");  // not ours
  write("possible", "0-2\n");
  write("nodes/cpulist", "0\n");
  const Topology two = read_topology(root, {0, 1, 2, 3, 4});
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[0].id, 0);
  EXPECT_EQ(two[0].cpus, (std::vector<int>{0, 1, 4}));
  EXPECT_EQ(two[1].id, 1);
  EXPECT_EQ(two[1].cpus, (std::vector<int>{2, 3}));
}

}  // namespace
}  // namespace millrace
