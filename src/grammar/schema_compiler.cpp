#include "grammar/schema_compiler.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/work_budget.h"
#include "grammar/compiled_grammar.h"

namespace millrace::grammar {
namespace {

constexpr size_t kMaxRules = 5000;
constexpr size_t kMaxAlternatives = 20'000;     // of all anyOf and oneOf together, multiplied out
constexpr size_t kMaxTogether = 10'000;         // by $ref, allOf and the branches chosen
constexpr size_t kMaxComparisons = 20'000'000;  // of the values of two enums
constexpr size_t kMaxExclusive = 64;            // branches of one oneOf

std::string printable(const std::string& text) {
  constexpr size_t kMaxShown = 40;
  std::string out;
  for (const char c : text.substr(0, kMaxShown)) out += c > 0x20 && c < 0x7f ? c : '?';
  return "'" + out + "'";
}

}  // namespace

SchemaCompiler::SchemaCompiler(SchemaDocument& document, GrammarBuilder& builder, Objects objects)
    : document_(document), builder_(builder), json_(builder), objects_(objects) {}

RuleId SchemaCompiler::compile() {
  const RuleId root = rule_of({&document_.root()});
  while (!pending_.empty()) {
    const auto [rule, key] = std::move(pending_.back());
    pending_.pop_back();
    objects_ = key.second;
    builder_.define(rule, body_of(key.first));
  }
  if (!must_be_empty_.empty()) {
    const std::vector<uint8_t> matches_something = builder_.productive();
    for (const MustBeEmpty& entry : must_be_empty_) {
      if (matches_something[entry.rule] != 0) throw Error(ErrorCode::kUnsupported, entry.message);
    }
  }
  return root;
}

RuleId SchemaCompiler::rule_of(Conjunction conjunction) {
  std::sort(conjunction.begin(), conjunction.end());
  conjunction.erase(std::unique(conjunction.begin(), conjunction.end()), conjunction.end());
  RuleKey key(std::move(conjunction), objects_);
  const auto [it, is_new] = rules_.try_emplace(key, 0);
  if (is_new) {
    if (rules_.size() > kMaxRules)
      throw_error(ErrorCode::kUnsupported, "schema: takes more than {} rules", kMaxRules);
    it->second = builder_.add_rule(document_.pointer(*key.first[0]));
    pending_.push_back({it->second, std::move(key)});
  }
  return it->second;
}

ExprId SchemaCompiler::value_of(Conjunction conjunction) {
  const auto is_anything = [](const Json* schema) {
    return (schema->is_boolean() && schema->get<bool>()) || (schema->is_object() && schema->empty());
  };
  std::erase_if(conjunction, is_anything);
  if (conjunction.empty()) return json_.value();
  for (const Json* schema : conjunction) {
    if (schema->is_boolean()) return builder_.nothing();
  }
  return builder_.rule(rule_of(std::move(conjunction)));
}

ExprId SchemaCompiler::body_of(const Conjunction& conjunction) {
  Open open;
  for (const Json* schema : conjunction) {
    if (!add(open, *schema, -1)) return builder_.nothing();
  }
  std::vector<ExprId> alternatives;
  expand(std::move(open), alternatives);
  return builder_.choice(std::move(alternatives));
}

// False when nothing can satisfy it: a schema that refers to itself without saying anything in between.
bool SchemaCompiler::add(Open& open, const Json& schema, int parent) {
  document_.check(schema);
  if (schema.is_boolean()) return schema.get<bool>();
  for (int i = parent; i >= 0; i = open.items[static_cast<size_t>(i)].parent) {
    if (open.items[static_cast<size_t>(i)].schema == &schema) return false;
  }
  spend_work(1 + open.items.size() / 8);
  if (open.items.size() >= kMaxTogether)
    throw_error(ErrorCode::kUnsupported, "schema: {}: more than {} schemas for one value",
                document_.pointer(schema), kMaxTogether);
  const bool is_known = std::any_of(open.items.begin(), open.items.end(),
                                    [&](const Open::Item& item) { return item.schema == &schema; });
  if (!is_known) open.items.push_back({&schema, parent});
  return true;
}

bool SchemaCompiler::follow(Open& open) {
  for (; open.num_done < open.items.size(); ++open.num_done) {
    const auto item = static_cast<int>(open.num_done);
    const Json& schema = *open.items[open.num_done].schema;
    if (document_.string(schema, "$ref") != nullptr && !add(open, document_.resolve(schema), item))
      return false;
    for (const char* key : {"allOf", "anyOf", "oneOf"}) {
      const Json* parts = document_.array(schema, key);
      if (parts == nullptr) continue;
      if (parts->empty()) document_.fail(schema, key, "expected at least one schema");
      if (key[0] == 'a' && key[1] == 'l') {
        for (size_t i = 0; i < parts->size(); ++i) {
          if (!add(open, document_.child(schema, key, i), item)) return false;
        }
      } else {
        open.groups.push_back({item, key[0] == 'o'});
      }
    }
    if (schema.contains("not")) {
      const Json& negated = document_.child(schema, "not");
      document_.check(negated);
      if (negated.is_boolean() ? negated.get<bool>() : negated.empty()) return false;
    }
  }
  return true;
}

// How many alternatives the groups that are not chosen yet multiply out to: more than the limit are refused
// before the first of them is looked at.
void SchemaCompiler::check_alternatives(const Open& open) const {
  size_t product = 1;
  for (size_t g = open.num_chosen; g < open.groups.size(); ++g) {
    const Json& schema = *open.items[static_cast<size_t>(open.groups[g].item)].schema;
    const Json& branches = *schema.find(open.groups[g].exactly_one ? "oneOf" : "anyOf");
    const auto possible = std::count_if(branches.begin(), branches.end(), [](const Json& branch) {
      return !branch.is_boolean() || branch.get<bool>();
    });
    product *= static_cast<size_t>(possible);
    if (product > kMaxAlternatives) break;
  }
  if (num_alternatives_ + product > kMaxAlternatives)
    throw_error(ErrorCode::kUnsupported, "schema: anyOf and oneOf multiply out to more than {} alternatives",
                kMaxAlternatives);
}

void SchemaCompiler::expand(Open open, std::vector<ExprId>& alternatives) {
  if (!follow(open)) return;
  spend_work(10 + open.items.size());
  check_alternatives(open);
  if (open.num_chosen == open.groups.size()) {
    ++num_alternatives_;
    Conjunction schemas;
    for (const Open::Item& item : open.items) schemas.push_back(item.schema);
    alternatives.push_back(resolved(schemas));
    return;
  }
  const Open::Group group = open.groups[open.num_chosen++];
  const Json& schema = *open.items[static_cast<size_t>(group.item)].schema;
  const std::string_view key = group.exactly_one ? "oneOf" : "anyOf";
  const Json& branches = *schema.find(key);
  if (group.exactly_one) check_exclusive(open, group, branches);
  for (size_t i = 0; i < branches.size(); ++i) {
    Open chosen = open;
    if (add(chosen, document_.child(schema, key, i), group.item)) expand(std::move(chosen), alternatives);
  }
}

// oneOf is anyOf where no value satisfies two branches: the conjunction of any two must be empty.
void SchemaCompiler::check_exclusive(const Open& open, const Open::Group& group, const Json& branches) {
  const Json& schema = *open.items[static_cast<size_t>(group.item)].schema;
  if (branches.size() > kMaxExclusive)
    document_.refuse(schema, "oneOf", "has {} branches, at most {} are supported", branches.size(),
                     kMaxExclusive);
  for (size_t i = 0; i < branches.size(); ++i) {
    for (size_t j = i + 1; j < branches.size(); ++j) {
      const Json &a = document_.child(schema, "oneOf", i), &b = document_.child(schema, "oneOf", j);
      document_.check(a);
      document_.check(b);
      if (plainly_exclusive(a, b)) continue;
      // The context without the group's own schema, or the conjunction would choose from the group again.
      // What the context names is missing here, hence open.
      const Objects written = std::exchange(objects_, Objects::kOpen);
      const RuleId both = rule_of({&a, &b});
      objects_ = written;
      must_be_empty_.push_back(
          {both, fmt::format("schema: {}/oneOf: branches {} and {} may both match, which is not "
                             "supported; anyOf does not mind",
                             document_.pointer(schema), i, j)});
    }
  }
}

bool SchemaCompiler::plainly_exclusive(const Json& a, const Json& b) {
  if (a.is_boolean() || b.is_boolean())
    return (a.is_boolean() && !a.get<bool>()) || (b.is_boolean() && !b.get<bool>());
  return (types_of(a) & types_of(b)) == 0;
}

uint8_t SchemaCompiler::type_named(const Json& schema, const Json& name) {
  static const std::map<std::string, uint8_t> types = {
      {"null", kNull},     {"boolean", kBoolean}, {"integer", kInteger}, {"number", kNumber},
      {"string", kString}, {"array", kArray},     {"object", kObject}};
  const auto it = name.is_string() ? types.find(name.get<std::string>()) : types.end();
  if (it == types.end())
    document_.fail(schema, "type", "found {}, expected the name of a JSON type",
                   name.is_string() ? printable(name.get<std::string>()) : name.type_name());
  return it->second;
}

uint8_t SchemaCompiler::types_of(const Json& schema) {
  uint8_t types = kAllTypes;
  if (const auto it = schema.find("type"); it != schema.end()) {
    types = 0;
    if (it->is_array()) {
      for (const Json& name : *it) types |= type_named(schema, name);
    } else {
      types = type_named(schema, *it);
    }
  }
  if (schema.contains("not")) {
    const Json& negated = document_.child(schema, "not");
    if (negated.is_object() && negated.size() == 1 && negated.contains("type")) {
      const uint8_t without = types_of(negated);
      if ((without & kNumber) == kInteger)
        document_.refuse(schema, "not", "numbers that are not integers are not supported");
      types = static_cast<uint8_t>(types & ~without);
    } else if (!negated.is_boolean() && !negated.empty()) {
      document_.refuse(schema, "not", "only 'type' can be negated");
    }
  }
  return types;
}

uint8_t SchemaCompiler::types_of(const Conjunction& schemas) {
  uint8_t types = kAllTypes;
  for (const Json* schema : schemas) types &= types_of(*schema);
  return types;
}

uint8_t SchemaCompiler::type_of(const Json& value) {
  if (value.is_null()) return kNull;
  if (value.is_boolean()) return kBoolean;
  if (value.is_string()) return kString;
  if (value.is_array()) return kArray;
  if (value.is_object()) return kObject;
  const std::optional<std::string> text = number_text(value);
  return !text || text->find_first_of(".e") != std::string::npos ? kFraction : kInteger;
}

// The values that all enum and const keywords have in common; nothing when there are no such keywords.
std::optional<std::vector<const Json*>> SchemaCompiler::values_of(const Conjunction& schemas) {
  std::optional<std::vector<const Json*>> values;
  const auto restrict_to = [&](const std::vector<const Json*>& allowed) {
    if (!values) {
      values = allowed;
      return;
    }
    if (values->size() * allowed.size() > kMaxComparisons)
      throw_error(ErrorCode::kUnsupported, "schema: two enums of {} and {} values for one value are too many",
                  values->size(), allowed.size());
    std::erase_if(*values, [&](const Json* value) {
      spend_work(1 + allowed.size());
      return std::none_of(allowed.begin(), allowed.end(),
                          [&](const Json* other) { return *other == *value; });
    });
  };
  for (const Json* schema : schemas) {
    if (const Json* list = document_.array(*schema, "enum")) {
      std::vector<const Json*> allowed;
      for (const Json& value : *list) allowed.push_back(&value);
      restrict_to(allowed);
    }
    if (schema->contains("const")) restrict_to({&*schema->find("const")});
  }
  return values;
}

bool SchemaCompiler::satisfies(const Json& value, const Conjunction& schemas, uint8_t types) {
  if ((type_of(value) & types) == 0) return false;
  if (value.is_string()) {
    const std::optional<CharDfa> dfa = string_dfa(schemas, true);
    return !dfa || dfa->matches(value.get<std::string>());
  }
  if (value.is_number()) {
    const std::optional<CharDfa> dfa = number_dfa_of(schemas, false);
    const std::optional<std::string> text = number_text(value);
    return !dfa || (text && dfa->matches(*text));
  }
  if (!value.is_structured()) return true;
  constexpr const char* kContainerKeywords[] = {"properties",   "patternProperties", "additionalProperties",
                                                "required",     "minProperties",     "maxProperties",
                                                "items",        "prefixItems",       "additionalItems",
                                                "minItems",     "maxItems",          "uniqueItems",
                                                "propertyNames"};
  for (const Json* schema : schemas) {
    for (const char* key : kContainerKeywords) {
      if (schema->contains(key))
        document_.refuse(*schema, key, "is not supported beside an object or array in enum or const");
    }
  }
  return true;
}

ExprId SchemaCompiler::resolved(const Conjunction& schemas) {
  if (schemas.empty()) return json_.value();
  const uint8_t types = types_of(schemas);
  if (const auto values = values_of(schemas)) {
    std::vector<ExprId> literals;
    for (const Json* value : *values) {
      if (satisfies(*value, schemas, types)) literals.push_back(json_.literal(*value));
    }
    return builder_.choice(std::move(literals));
  }
  std::vector<ExprId> parts;
  if ((types & kNull) != 0) parts.push_back(builder_.bytes("null"));
  if ((types & kBoolean) != 0) {
    parts.push_back(builder_.bytes("true"));
    parts.push_back(builder_.bytes("false"));
  }
  if ((types & kString) != 0) parts.push_back(string_of(schemas));
  if ((types & kNumber) != 0) parts.push_back(number_of(schemas, (types & kFraction) == 0));
  if ((types & kArray) != 0) parts.push_back(array_of(schemas));
  if ((types & kObject) != 0) parts.push_back(object_of(schemas));
  return builder_.choice(std::move(parts));
}

std::shared_ptr<const Grammar> compile_json_schema(std::string_view schema_json, Objects objects) {
  SchemaDocument document(schema_json);
  GrammarBuilder builder;
  const RuleId root = SchemaCompiler(document, builder, objects).compile();
  return std::make_shared<const Grammar>(compile_automaton(builder, root, "schema"), true);
}

}  // namespace millrace::grammar
