// What a model would need here and how fast it would be, told before it is fetched: from the head of its
// files, which the hub sends alone, and from this machine's memory.
#pragma once

#include <optional>
#include <string>

#include "engine/memory_plan.h"
#include "hub/puller.h"
#include "hub/settings.h"
#include "millrace/options.h"

namespace millrace::cli {

struct FetchEstimate {
  std::string architecture, device;
  MemoryPlan memory;
  bool fits = false;
  double token_bytes = 0.0;         // weights that one token reads
  std::optional<double> read_gb_s;  // measured; empty for a device with memory of its own

  std::optional<double> tokens_per_s() const {
    if (!read_gb_s || token_bytes <= 0) return std::nullopt;
    return *read_gb_s * 1e9 / token_bytes;
  }
};
// Throws Error when Millrace does not load it.
FetchEstimate estimate_fetch(const hub::PullPlan& plan, const hub::Settings& settings,
                             const EngineOptions& options);

// A few lines, each with its end.
std::string describe_fetch(const hub::PullPlan& plan, const FetchEstimate& estimate,
                           const hub::Settings& settings);
// Of the plan alone: the lines about what is fetched.
std::string describe_fetch(const hub::PullPlan& plan, const hub::Settings& settings);

}  // namespace millrace::cli
