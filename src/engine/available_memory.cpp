#include "engine/available_memory.h"

#include <algorithm>
#include <fstream>
#include <string>

#include "base/topology.h"

namespace millrace {

size_t available_memory() {
  size_t available = 0;
  std::ifstream meminfo("/proc/meminfo");
  std::string word;
  while (meminfo >> word) {
    if (word == "MemAvailable:") {
      meminfo >> available;
      available *= 1024;
      break;
    }
  }
  return std::min(available, cgroup_memory("/proc/self/cgroup", "/sys/fs/cgroup"));
}

}  // namespace millrace
