// Energy that the machine's processors have used, as RAPL counts it: files of the system, one for each
// package, in microjoules, which begin again at zero when they have reached their range. Only root may read
// them on most systems.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace millrace {

class ProcessorEnergy {
 public:
  explicit ProcessorEnergy(const std::string& folder = "/sys/class/powercap");
  // Joules of all packages since this object was made; nothing: no counter can be read. A counter that went
  // around more than once between two calls (a minute or more at full load) is counted once.
  std::optional<double> joules();

 private:
  struct Package {
    std::string file;
    uint64_t last, range;  // microjoules
  };
  std::mutex mutex_;
  std::vector<Package> packages_;
  uint64_t used_ = 0;  // microjoules
};

}  // namespace millrace
