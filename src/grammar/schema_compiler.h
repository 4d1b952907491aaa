// From a JSON schema to expressions. The unit of work is a conjunction: several subschemas that one value
// must satisfy at once, as $ref, allOf and overlapping properties make them. A conjunction is a rule;
// conjunctions of the same subschemas are the same rule, which is how recursion ends.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "grammar/char_dfa.h"
#include "grammar/expression.h"
#include "grammar/grammar.h"
#include "grammar/json_rules.h"
#include "grammar/schema_document.h"

namespace millrace::grammar {

using Conjunction = std::vector<const Json*>;

class SchemaCompiler {
 public:
  SchemaCompiler(SchemaDocument& document, GrammarBuilder& builder, Objects objects);
  RuleId compile();

 private:
  enum Type : uint8_t {
    kNull = 1,
    kBoolean = 2,
    kInteger = 4,
    kFraction = 8,
    kString = 16,
    kArray = 32,
    kObject = 64
  };
  static constexpr uint8_t kNumber = kInteger | kFraction, kAllTypes = 127;

  // A conjunction being taken apart: $ref and allOf followed, one branch of every anyOf and oneOf chosen.
  struct Open {
    struct Item {
      const Json* schema = nullptr;
      int parent = -1;  // whose $ref, allOf or branch it is
    };
    struct Group {
      int item = 0;
      bool exactly_one = false;
    };
    std::vector<Item> items = {};
    size_t num_done = 0;
    std::vector<Group> groups = {};
    size_t num_chosen = 0;
  };

  RuleId rule_of(Conjunction conjunction);
  ExprId value_of(Conjunction conjunction);
  ExprId body_of(const Conjunction& conjunction);
  bool add(Open& open, const Json& schema, int parent);
  bool follow(Open& open);
  void check_alternatives(const Open& open) const;
  void expand(Open open, std::vector<ExprId>& alternatives);
  void check_exclusive(const Open& open, const Open::Group& group, const Json& branches);
  bool plainly_exclusive(const Json& a, const Json& b);

  ExprId resolved(const Conjunction& schemas);
  uint8_t types_of(const Conjunction& schemas);
  uint8_t types_of(const Json& schema);
  static uint8_t type_of(const Json& value);
  uint8_t type_named(const Json& schema, const Json& name);
  std::optional<std::vector<const Json*>> values_of(const Conjunction& schemas);
  bool satisfies(const Json& value, const Conjunction& schemas, uint8_t types);

  // schema_scalars.cpp
  ExprId string_of(const Conjunction& schemas);
  std::optional<CharDfa> string_dfa(const Conjunction& schemas, bool with_lengths);
  ExprId number_of(const Conjunction& schemas, bool integer);
  std::optional<CharDfa> number_dfa_of(const Conjunction& schemas, bool integer);
  void string_lengths(const Conjunction& schemas, uint32_t& min, uint32_t& max);
  const CharDfa& pattern_dfa(const Json& schema, std::string_view key, const std::string& pattern);

  // schema_containers.cpp
  ExprId array_of(const Conjunction& schemas);
  ExprId object_of(const Conjunction& schemas);
  struct Property {
    std::string name = {};
    ExprId pair = 0;  // "name": value
    bool required = false;
  };
  bool names_all(const Conjunction& schemas) const;
  std::vector<Property> properties_of(const Conjunction& schemas);
  std::optional<CharDfa> names_of(const Conjunction& schemas);
  Conjunction schemas_for(const Conjunction& schemas, const std::string& name);
  ExprId other_pairs(const Conjunction& schemas, const std::vector<Property>& properties,
                     const std::optional<CharDfa>& names);
  ExprId property_graph(const std::vector<Property>& properties, ExprId others, uint32_t min, uint32_t max);

  SchemaDocument& document_;
  GrammarBuilder& builder_;
  JsonRules json_;
  // What the rule that is being defined makes of objects, and the rules it calls. Whether two branches of a
  // oneOf can both match is asked of open ones, whatever is written.
  Objects objects_;
  using RuleKey = std::pair<Conjunction, Objects>;
  std::map<RuleKey, RuleId> rules_;
  std::vector<std::pair<RuleId, RuleKey>> pending_;
  struct MustBeEmpty {
    RuleId rule = 0;
    std::string message = {};
  };
  std::vector<MustBeEmpty> must_be_empty_;
  std::map<std::string, CharDfa> pattern_dfas_;
  size_t num_alternatives_ = 0;
};

}  // namespace millrace::grammar
