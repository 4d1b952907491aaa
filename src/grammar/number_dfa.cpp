#include "grammar/number_dfa.h"

#include <algorithm>

#include "base/error.h"
#include "grammar/regex.h"

namespace millrace::grammar {
namespace {

constexpr int kMaxPlaces = 9;           // decimals of a step
constexpr uint64_t kMaxModulus = 5000;  // a state per remainder

CharDfa of_pattern(const std::string& pattern, const std::string& what) {
  return CharDfa::from_nfa(parse_regex(pattern, false, what), what);
}

std::string digits_above(char digit) { return fmt::format("[{}-9]", static_cast<char>(digit + 1)); }

// A pattern of the magnitudes at or above `bound` (above it, if exclusive).
std::string magnitudes_from(const Decimal& bound, bool exclusive) {
  const std::string any_fraction = "(\\.\\d+)?";
  const std::string& whole = bound.whole;
  const std::string& fraction = bound.fraction;
  std::string pattern = fmt::format("[1-9]\\d{{{},}}{}", whole.size(), any_fraction);
  for (size_t i = 0; i < whole.size(); ++i) {
    if (whole[i] == '9') continue;
    pattern += fmt::format("|{}{}\\d{{{}}}{}", whole.substr(0, i), digits_above(whole[i]),
                           whole.size() - i - 1, any_fraction);
  }
  if (fraction.empty()) {
    return pattern + "|" + whole + (exclusive ? "\\.\\d*[1-9]\\d*" : any_fraction);
  }
  for (size_t i = 0; i < fraction.size(); ++i) {
    if (fraction[i] == '9') continue;
    pattern += fmt::format("|{}\\.{}{}\\d*", whole, fraction.substr(0, i), digits_above(fraction[i]));
  }
  return pattern + fmt::format("|{}\\.{}\\d*{}", whole, fraction, exclusive ? "[1-9]\\d*" : "");
}

CharDfa well_formed(bool integer, const std::string& what) {
  if (integer) return of_pattern(fmt::format("0|-?[1-9]\\d{{0,{}}}", JsonRules::kIntegerDigits - 1), what);
  std::string pattern;
  for (int n = 1; n < JsonRules::kNumberDigits; ++n) {
    pattern += fmt::format("{}{}(\\.\\d{{1,{}}})?|", n == 1 ? "\\d" : "[1-9]",
                           n == 1 ? "" : fmt::format("\\d{{{}}}", n - 1), JsonRules::kNumberDigits - n);
  }
  pattern += fmt::format("[1-9]\\d{{{}}}", JsonRules::kNumberDigits - 1);
  const CharDfa minus_zero = of_pattern("-0(\\.0+)?", what);
  return of_pattern("-?(" + pattern + ")", what).intersection(minus_zero.complement(), what);
}

CharDfa at_least(const NumberBound& bound, const std::string& what) {
  if (bound.value.negative)
    return of_pattern("-(" + magnitudes_from(bound.value, !bound.exclusive) + ")", what).complement();
  return of_pattern(magnitudes_from(bound.value, bound.exclusive), what);
}

CharDfa at_most(const NumberBound& bound, const std::string& what) {
  if (bound.value.negative)
    return of_pattern("-(" + magnitudes_from(bound.value, bound.exclusive) + ")", what);
  return of_pattern(magnitudes_from(bound.value, !bound.exclusive), what).complement();
}

CharDfa multiple_of(const Decimal& step, const std::string& what) {
  const std::string digits = step.whole == "0" ? step.fraction : step.whole + step.fraction;
  uint64_t modulus = 0;
  for (const char c : digits) {
    modulus = modulus * 10 + static_cast<uint64_t>(c - '0');
    if (modulus > kMaxModulus) break;
  }
  if (modulus > kMaxModulus || step.fraction.size() > kMaxPlaces)
    throw_error(ErrorCode::kUnsupported, "{}: a step of {}.{} is not supported, at most {} units of 1e-{}",
                what, step.whole, step.fraction, kMaxModulus, kMaxPlaces);
  return CharDfa::of_multiples(static_cast<uint32_t>(modulus), static_cast<uint32_t>(step.fraction.size()),
                               what);
}

}  // namespace

Decimal to_decimal(const Json& number) {
  Decimal result;
  std::string text = number.is_number_float() ? fmt::format("{}", number.get<double>()) : number.dump();
  if (text.starts_with('-')) {
    result.negative = true;
    text.erase(0, 1);
  }
  int exponent = 0;
  if (const size_t e = text.find('e'); e != std::string::npos) {
    exponent = std::stoi(text.substr(e + 1));
    text.resize(e);
  }
  const size_t point = std::min(text.find('.'), text.size());
  std::string digits = text.substr(0, point) + (point < text.size() ? text.substr(point + 1) : "");
  int whole = static_cast<int>(point) + exponent;  // digits before the point
  if (whole < 0) {
    digits.insert(0, static_cast<size_t>(-whole), '0');
    whole = 0;
  }
  if (static_cast<size_t>(whole) > digits.size())
    digits.append(static_cast<size_t>(whole) - digits.size(), '0');
  result.whole = digits.substr(0, static_cast<size_t>(whole));
  result.fraction = digits.substr(static_cast<size_t>(whole));
  result.whole.erase(0, result.whole.find_first_not_of('0'));  // npos: all of it
  if (result.whole.empty()) result.whole = "0";
  while (result.fraction.ends_with('0')) result.fraction.pop_back();
  if (result.is_zero()) result.negative = false;
  return result;
}

CharDfa number_dfa(const NumberLimits& limits, const std::string& what) {
  CharDfa dfa = well_formed(limits.integer, what);
  for (const NumberBound& bound : limits.at_least) dfa = dfa.intersection(at_least(bound, what), what);
  for (const NumberBound& bound : limits.at_most) dfa = dfa.intersection(at_most(bound, what), what);
  for (const Decimal& step : limits.multiples_of) dfa = dfa.intersection(multiple_of(step, what), what);
  return dfa;
}

}  // namespace millrace::grammar
