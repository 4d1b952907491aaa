#include "base/topology.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <map>
#include <system_error>

namespace millrace {

std::vector<int> parse_cpu_list(std::string_view text) {
  std::vector<int> cpus;
  const char *at = text.data(), *end = at + text.size();
  while (at < end) {
    int first = 0;
    auto [after, error] = std::from_chars(at, end, first);
    if (error != std::errc()) break;
    int last = first;
    if (after < end && *after == '-') {
      const auto range = std::from_chars(after + 1, end, last);
      if (range.ec != std::errc()) break;
      after = range.ptr;
    }
    if (first < 0 || last >= CPU_SETSIZE) break;
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
    if (after == end || *after != ',') break;
    at = after + 1;
  }
  return cpus;
}

Topology read_topology(const std::string& root, const std::vector<int>& allowed) {
  std::map<int, std::vector<int>> nodes;  // by number: a folder is listed in any order
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(root, none)) {
    const std::string name = entry.path().filename().string();
    int id = 0;
    if (name.rfind("node", 0) != 0) continue;
    const auto [after, error] = std::from_chars(name.data() + 4, name.data() + name.size(), id);
    if (error != std::errc() || after != name.data() + name.size()) continue;
    std::ifstream file(entry.path() / "cpulist");
    std::string list;
    std::getline(file, list);
    for (const int cpu : parse_cpu_list(list)) {
      if (std::find(allowed.begin(), allowed.end(), cpu) != allowed.end()) nodes[id].push_back(cpu);
    }
  }
  Topology topology;
  for (auto& [id, cpus] : nodes) topology.push_back({id, std::move(cpus)});
  if (topology.empty()) topology.push_back({0, allowed});
  return topology;
}

Topology machine_topology() { return read_topology("/sys/devices/system/node", allowed_cpus()); }

std::vector<int> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

bool run_on(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  return sched_setaffinity(0, sizeof set, &set) == 0;
}

namespace {

// "max 100000" or "150000 100000" of version 2; 0 when there is none.
double quota_v2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return 0;
  return std::strtod(quota.c_str(), nullptr) / period;
}

double quota_v1(const std::string& folder) {
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us"), period_file(folder + "/cpu.cfs_period_us");
  double quota = 0, period = 0;
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return 0;
  return quota / period;
}

// What is left below the limit of a group: bytes that the kernel could give, those of cached files among
// them.
size_t memory_left(const std::string& folder, const char* limit_name, const char* used_name,
                   const char* prefix) {
  std::ifstream limit_file(folder + limit_name), used_file(folder + used_name),
      details(folder + "/memory.stat");
  size_t limit = 0, used = 0, files = 0, bytes = 0;
  if (!(limit_file >> limit) || !(used_file >> used)) return kNoLimit;  // "max", or no such group
  for (std::string name; details >> name >> bytes;) {
    if (name == std::string(prefix) + "active_file" || name == std::string(prefix) + "inactive_file")
      files += bytes;
  }
  used -= std::min(used, files);
  return limit - std::min(limit, used);
}

// Calls `v2` or `v1` with the folder of each group that the controller has this process in, and of those
// above it.
template <class Visit2, class Visit1>
void for_each_group(const std::string& proc_cgroup, const std::string& root, const std::string& controller,
                    std::initializer_list<const char*> mounts, Visit2 v2, Visit1 v1) {
  std::ifstream groups(proc_cgroup);
  const auto upwards = [](const std::string& mount, std::string path, const auto& visit) {
    for (;; path.erase(path.rfind('/'))) {
      visit(mount + path);
      if (path.empty()) return;
    }
  };
  // "0::/a/b" in version 2, "4:cpu,cpuacct:/a/b" in version 1.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    if (path.empty() || path[0] != '/' || path.find("..") != std::string::npos) path.clear();
    while (!path.empty() && path.back() == '/') path.pop_back();
    if (controllers == ",,") upwards(root, path, v2);
    if (controllers.find("," + controller + ",") == std::string::npos) continue;
    for (const char* mount : mounts) upwards(root + mount, path, v1);
  }
  v2(root);  // inside a container the own group is mounted as the root
}

}  // namespace

double cgroup_cpus(const std::string& proc_cgroup, const std::string& root) {
  double tight = 0;
  const auto note = [&](double quota) {
    if (quota > 0 && (tight == 0 || quota < tight)) tight = quota;
  };
  for_each_group(
      proc_cgroup, root, "cpu", {"/cpu", "/cpu,cpuacct"},
      [&](const std::string& folder) { note(quota_v2(folder)); },
      [&](const std::string& folder) { note(quota_v1(folder)); });
  return tight;
}

size_t largest_cache(const std::string& root) {
  size_t largest = 0;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(root, none)) {
    std::ifstream file(entry.path() / "size");  // "48K", "2048K", "300M"
    size_t count = 0;
    char unit = 0;
    if (!(file >> count >> unit)) continue;
    if (unit == 'K') largest = std::max(largest, count << 10);
    if (unit == 'M') largest = std::max(largest, count << 20);
  }
  return largest;
}

size_t beyond_caches() {
  constexpr size_t kLeast = size_t{512} << 20, kPiece = size_t{1} << 20;
  const size_t wanted = 16 * largest_cache("/sys/devices/system/cpu/cpu0/cache");
  const auto memory =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::max(kLeast, std::min(wanted, memory / 8) / kPiece * kPiece);
}

size_t cgroup_memory(const std::string& proc_cgroup, const std::string& root) {
  size_t tight = kNoLimit;
  for_each_group(
      proc_cgroup, root, "memory", {"/memory"},
      [&](const std::string& folder) {
        tight = std::min(tight, memory_left(folder, "/memory.max", "/memory.current", ""));
      },
      [&](const std::string& folder) {
        tight = std::min(tight,
                         memory_left(folder, "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_"));
      });
  return tight;
}

int available_cpus() {
  int cpus = std::max(1, static_cast<int>(allowed_cpus().size()));
  const double quota = cgroup_cpus("/proc/self/cgroup", "/sys/fs/cgroup");
  if (quota > 0) cpus = std::min(cpus, std::max(1, static_cast<int>(std::ceil(quota))));
  return cpus;
}

}  // namespace millrace
