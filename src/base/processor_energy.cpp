#include "base/processor_energy.h"

#include <filesystem>
#include <fstream>
#include <system_error>

namespace millrace {
namespace {

std::optional<uint64_t> read_number(const std::string& file) {
  std::ifstream in(file);
  uint64_t value = 0;
  if (!(in >> value)) return std::nullopt;
  return value;
}

}  // namespace

ProcessorEnergy::ProcessorEnergy(const std::string& folder) {
  std::error_code error;
  for (const auto& zone : std::filesystem::directory_iterator(folder, error)) {
    const std::string path = zone.path().string();
    std::ifstream in(path + "/name");
    std::string name;
    // Parts of a package (cores, memory) have zones of their own, which it counts already.
    if (!(in >> name) || name.rfind("package", 0) != 0) continue;
    const std::optional<uint64_t> now = read_number(path + "/energy_uj"),
                                  range = read_number(path + "/max_energy_range_uj");
    if (now && range) packages_.push_back({path + "/energy_uj", *now, *range});
  }
}

std::optional<double> ProcessorEnergy::joules() {
  const std::lock_guard lock(mutex_);
  for (Package& package : packages_) {
    const std::optional<uint64_t> now = read_number(package.file);
    if (!now) return std::nullopt;
    used_ += *now >= package.last ? *now - package.last : package.range - package.last + *now;
    package.last = *now;
  }
  if (packages_.empty()) return std::nullopt;
  return static_cast<double>(used_) * 1e-6;
}

}  // namespace millrace
