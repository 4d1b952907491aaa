// Which CPUs this process may use, and which memory they are near to. A machine with several memory nodes
// (sockets, or parts of one) reads another node's memory at a fraction of the speed of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace millrace {

// One entry per memory node that has CPUs we may run on; cpus are ascending.
struct MemoryNode {
  int id = 0;
  std::vector<int> cpus;
};
using Topology = std::vector<MemoryNode>;

// "0-3,8,10-11" as the kernel writes it; what is no such list is read as far as it is one.
std::vector<int> parse_cpu_list(std::string_view text);

// The nodes listed under `root` (as /sys/devices/system/node), cut down to `allowed`. Never empty: where
// nothing is listed, one node with all that is allowed.
Topology read_topology(const std::string& root, const std::vector<int>& allowed);

// Of this machine, cut by the process's affinity mask.
Topology machine_topology();

// The CPUs of the calling thread's affinity mask.
std::vector<int> allowed_cpus();

// Keeps the calling thread on these CPUs. False when the system refuses (they do not exist, or are not ours).
bool run_on(const std::vector<int>& cpus);

// CPUs this process may run on: its affinity mask, cut by the cgroup's quota.
int available_cpus();

// The CPUs that the control groups listed in `proc_cgroup` (as /proc/self/cgroup) and mounted at `root`
// grant, of versions 1 and 2, the tightest of all levels; 0: no limit.
double cgroup_cpus(const std::string& proc_cgroup, const std::string& root);

// Bytes that the same groups leave to this process, the tightest of all levels.
inline constexpr size_t kNoLimit = SIZE_MAX;
size_t cgroup_memory(const std::string& proc_cgroup, const std::string& root);

// The largest cache listed under `root` (as /sys/devices/system/cpu/cpu0/cache), in bytes; 0: none is.
size_t largest_cache(const std::string& root);

// So much memory that caches hold a sixteenth of it at most, or an eighth of the machine's: what a loop that
// measures memory must read through. A processor for servers may have 300 MiB of cache.
size_t beyond_caches();

}  // namespace millrace
