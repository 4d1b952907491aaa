// Numbers between bounds and multiples of a step, as automata over their digits.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "grammar/char_dfa.h"
#include "grammar/json_rules.h"

namespace millrace::grammar {

// Sign, digits before the point without leading zeros, digits after it without trailing ones.
struct Decimal {
  bool negative = false;
  std::string whole = "0", fraction = {};
  bool is_zero() const { return whole == "0" && fraction.empty(); }
};
Decimal to_decimal(const Json& number);

struct NumberBound {
  Decimal value = {};
  bool exclusive = false;
};

struct NumberLimits {
  bool integer = false;
  std::vector<NumberBound> at_least = {}, at_most = {};
  std::vector<Decimal> multiples_of = {};
  bool any() const { return !at_least.empty() || !at_most.empty() || !multiples_of.empty(); }
};

// Numbers without exponent. Throws Error{kUnsupported}, naming `what`, for steps that take too many states.
CharDfa number_dfa(const NumberLimits& limits, const std::string& what);

}  // namespace millrace::grammar
