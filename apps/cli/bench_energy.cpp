#include "bench_energy.h"

#include <fmt/core.h>

#include "base/error.h"

namespace millrace::cli {

void EnergyUse::add(const Joules& before, const Joules& after, int64_t tokens, double seconds) {
  for (const auto& [counter, joules] : after) {
    if (const auto earlier = before.find(counter); earlier != before.end())
      used_[counter] += joules - earlier->second;
  }
  tokens_ += tokens;
  seconds_ += seconds;
}

nlohmann::ordered_json EnergyUse::json() const {
  if (seconds_ < kLeastSeconds || tokens_ == 0) return {};
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const auto& [counter, joules] : used_) json[counter] = joules / static_cast<double>(tokens_);
  return json;
}

std::string EnergyUse::text() const {
  if (seconds_ < kLeastSeconds || tokens_ == 0)
    return fmt::format("too short to count: {:.2f} s, expected {:.1f} or more", seconds_, kLeastSeconds);
  std::string out;
  for (const auto& [counter, joules] : used_) {
    out += fmt::format("{}{}: {:.4f} J a token ({:.1f} J)", out.empty() ? "" : ", ", counter,
                       joules / static_cast<double>(tokens_), joules);
  }
  return out;
}

void refuse_without_counters() {
  throw_error(
      ErrorCode::kUnsupported,
      "--energy: found no counter that can be read: expected a GPU with NVML (libnvidia-ml.so.1) or RAPL's "
      "/sys/class/powercap/*/energy_uj, which root may read");
}

Joules EnergyCounters::read() {
  Joules joules;
  if (const auto energy = backend_.energy()) joules[energy->counter] = energy->joules;
  if (const auto processors = processors_.joules()) joules["processors"] = *processors;
  return joules;
}

void EnergyCounters::check() {
  if (read().empty()) refuse_without_counters();
}

}  // namespace millrace::cli
