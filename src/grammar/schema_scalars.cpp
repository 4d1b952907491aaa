// Strings and numbers under a conjunction of schemas: automata for what they all demand.
#include <algorithm>

#include "grammar/number_dfa.h"
#include "grammar/regex.h"
#include "grammar/schema_compiler.h"
#include "grammar/string_formats.h"

namespace millrace::grammar {

void SchemaCompiler::string_lengths(const Conjunction& schemas, uint32_t& min, uint32_t& max) {
  min = 0;
  max = kUnbounded;
  for (const Json* schema : schemas) {
    if (const auto n = document_.count(*schema, "minLength")) min = std::max(min, *n);
    if (const auto n = document_.count(*schema, "maxLength")) max = std::min(max, *n);
  }
}

const CharDfa& SchemaCompiler::pattern_dfa(const Json& schema, std::string_view key,
                                           const std::string& pattern) {
  auto it = pattern_dfas_.find(pattern);
  if (it == pattern_dfas_.end()) {
    const std::string what = fmt::format("schema: {}/{}", document_.pointer(schema), key);
    it = pattern_dfas_.emplace(pattern, CharDfa::from_nfa(parse_regex(pattern, true, what), what)).first;
  }
  return it->second;
}

// Nothing when patterns and formats say nothing, and lengths neither or not `with_lengths`.
std::optional<CharDfa> SchemaCompiler::string_dfa(const Conjunction& schemas, bool with_lengths) {
  std::optional<CharDfa> dfa;
  const auto restrict_to = [&](const Json& schema, const CharDfa& other) {
    dfa = dfa ? dfa->intersection(other, "schema: " + document_.pointer(schema)) : other;
  };
  for (const Json* schema : schemas) {
    if (const std::string* pattern = document_.string(*schema, "pattern"))
      restrict_to(*schema, pattern_dfa(*schema, "pattern", *pattern));
    const std::string* format = document_.string(*schema, "format");
    const std::string_view known = format != nullptr ? format_pattern(*format) : std::string_view();
    if (!known.empty())
      restrict_to(*schema, pattern_dfa(*schema, "format", "^(?:" + std::string(known) + ")$"));
  }
  uint32_t min = 0, max = kUnbounded;
  string_lengths(schemas, min, max);
  if ((min == 0 && max == kUnbounded) || (!dfa && !with_lengths)) return dfa;
  const std::string what = "schema: " + document_.pointer(*schemas[0]);
  restrict_to(*schemas[0], CharDfa::of_lengths(min, max, what));
  return dfa;
}

ExprId SchemaCompiler::string_of(const Conjunction& schemas) {
  if (const std::optional<CharDfa> dfa = string_dfa(schemas, false)) {
    return json_.quoted(dfa->expression(builder_, true));
  }
  uint32_t min = 0, max = kUnbounded;
  string_lengths(schemas, min, max);
  if (min == 0 && max == kUnbounded) return json_.string();
  if (max < min) return builder_.nothing();
  return json_.string_of_length(min, max);
}

std::optional<CharDfa> SchemaCompiler::number_dfa_of(const Conjunction& schemas, bool integer) {
  NumberLimits limits;
  limits.integer = integer;
  for (const Json* schema : schemas) {
    if (const Json* n = document_.number(*schema, "minimum"))
      limits.at_least.push_back({to_decimal(*n), false});
    if (const Json* n = document_.number(*schema, "exclusiveMinimum"))
      limits.at_least.push_back({to_decimal(*n), true});
    if (const Json* n = document_.number(*schema, "maximum"))
      limits.at_most.push_back({to_decimal(*n), false});
    if (const Json* n = document_.number(*schema, "exclusiveMaximum"))
      limits.at_most.push_back({to_decimal(*n), true});
    if (const Json* n = document_.number(*schema, "multipleOf")) {
      limits.multiples_of.push_back(to_decimal(*n));
      if (limits.multiples_of.back().negative || limits.multiples_of.back().is_zero())
        document_.fail(*schema, "multipleOf", "found {}, expected a number above 0", n->dump());
    }
  }
  if (!limits.any()) return std::nullopt;
  return number_dfa(limits, "schema: " + document_.pointer(*schemas[0]));
}

ExprId SchemaCompiler::number_of(const Conjunction& schemas, bool integer) {
  if (const std::optional<CharDfa> dfa = number_dfa_of(schemas, integer))
    return dfa->expression(builder_, false);
  return integer ? json_.integer() : json_.number();
}

}  // namespace millrace::grammar
