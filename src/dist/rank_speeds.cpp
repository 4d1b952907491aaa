#include "dist/rank_speeds.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/error.h"

namespace millrace::dist {

std::vector<double> speeds_in_eighths(std::span<const double> measured) {
  const double fastest = *std::max_element(measured.begin(), measured.end());
  std::vector<double> speeds;
  for (const double speed : measured) speeds.push_back(std::max(1.0, std::round(8 * speed / fastest)) / 8);
  return speeds;
}

std::vector<double> speeds_within(std::vector<double> speeds, std::span<const size_t> memory, size_t bytes) {
  MILLRACE_CHECK(speeds.size() == memory.size());
  std::vector<bool> full(speeds.size(), false);
  std::vector<double> part(speeds.size());
  double left = static_cast<double>(bytes);
  for (bool again = true; again;) {
    double of_rest = 0;
    for (size_t r = 0; r < speeds.size(); ++r) of_rest += full[r] ? 0 : speeds[r];
    if (of_rest == 0) {
      throw_error(ErrorCode::kNoMemory, "rank speeds: found memory for all but {:.1f} GiB of the model",
                  left / (1 << 30));
    }
    again = false;
    double taken = 0;
    for (size_t r = 0; r < speeds.size(); ++r) {
      if (full[r]) continue;
      part[r] = left * speeds[r] / of_rest;
      if (part[r] <= static_cast<double>(memory[r])) continue;
      part[r] = static_cast<double>(memory[r]);
      taken += part[r];
      full[r] = again = true;
    }
    left -= taken;
  }
  if (std::none_of(full.begin(), full.end(), [](bool f) { return f; })) return speeds;
  // One that has no room at all still gets a share: shares are above 0.
  for (size_t r = 0; r < speeds.size(); ++r) {
    speeds[r] = std::max(1e-3, std::round(1000 * part[r] / static_cast<double>(bytes)) / 1000);
  }
  return speeds;
}

}  // namespace millrace::dist
