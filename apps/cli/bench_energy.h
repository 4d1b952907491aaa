// Joules a token, for millrace bench --energy: what the machine's counters have counted around what was
// timed.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "backend/backend.h"
#include "base/processor_energy.h"

namespace millrace::cli {

using Joules = std::map<std::string, double>;  // by counter

// What was used, in all, for how many tokens and how long. Counters are written some ten times a second: of
// less than kLeastSeconds they say nothing, and nothing is given.
class EnergyUse {
 public:
  static constexpr double kLeastSeconds = 0.5;
  void add(const Joules& before, const Joules& after, int64_t tokens, double seconds);
  nlohmann::ordered_json json() const;  // {counter: joules a token}, null: too short
  std::string text() const;

 private:
  Joules used_;
  int64_t tokens_ = 0;
  double seconds_ = 0.0;
};

[[noreturn]] void refuse_without_counters();

// The counters of a backend and of the machine's processors.
class EnergyCounters {
 public:
  explicit EnergyCounters(const Backend& backend) : backend_(backend) {}
  void check();  // throws Error{kUnsupported} where none can be read
  void start() { before_ = read(); }
  void stop(int64_t tokens, double seconds, EnergyUse& use) { use.add(before_, read(), tokens, seconds); }

 private:
  Joules read();
  const Backend& backend_;
  ProcessorEnergy processors_;
  Joules before_;
};

}  // namespace millrace::cli
