// Arrays and objects under a conjunction of schemas. Properties come in the order of the schema, each at most
// once; others after them, where there may be others.
#include <algorithm>
#include <set>

#include "grammar/schema_compiler.h"

namespace millrace::grammar {
namespace {

constexpr uint32_t kMaxItems = 10'000;       // counted items of an array
constexpr size_t kMaxObjectNodes = 100'000;  // properties times counted ones
constexpr size_t kMaxProperties = 10'000;
constexpr size_t kMaxPatterns = 6;  // of patternProperties: their subsets are told apart

bool allows_anything(const Json& schema) {
  return schema.is_boolean() ? schema.get<bool>() : schema.is_object() && schema.empty();
}

}  // namespace

ExprId SchemaCompiler::array_of(const Conjunction& schemas) {
  uint32_t min = 0, max = kUnbounded, num_prefix = 0;
  for (const Json* schema : schemas) {
    if (const auto n = document_.count(*schema, "minItems")) min = std::max(min, *n);
    if (const auto n = document_.count(*schema, "maxItems")) max = std::min(max, *n);
    const auto items = schema->find("items");
    for (const char* key : {"prefixItems", "items"}) {
      const auto it = schema->find(key);
      if (it != schema->end() && it->is_array())
        num_prefix = std::max(num_prefix, static_cast<uint32_t>(it->size()));
    }
    if (items != schema->end() && items->is_array() && schema->contains("prefixItems"))
      document_.fail(*schema, "items", "found an array, expected a schema beside prefixItems");
    document_.array(*schema, "prefixItems");
  }
  for (const Json* schema : schemas) {
    const auto unique = schema->find("uniqueItems");
    if (unique != schema->end() && unique->get<bool>() && max > 1)
      document_.refuse(*schema, "uniqueItems", "is not supported for more than one item");
  }
  if (max < min) return builder_.nothing();
  const uint32_t counted = std::max({min, num_prefix, max == kUnbounded ? 1 : max});
  if (counted > kMaxItems)
    document_.refuse(*schemas[0], min > kMaxItems ? "minItems" : "maxItems", "counts more than {} items",
                     kMaxItems);

  const auto item_of = [&](uint32_t i) {
    Conjunction parts;
    for (const Json* schema : schemas) {
      const bool old_style = schema->contains("items") && schema->find("items")->is_array();
      const std::string_view prefix = old_style ? "items" : "prefixItems",
                             rest = old_style ? "additionalItems" : "items";
      if (schema->contains(prefix) && i < schema->find(prefix)->size()) {
        parts.push_back(&document_.child(*schema, prefix, i));
      } else if (schema->contains(rest)) {
        parts.push_back(&document_.child(*schema, rest));
      }
    }
    for (const Json* part : parts) document_.check(*part);
    return value_of(parts);
  };
  ExprId rest = item_of(num_prefix);
  if (counted > num_prefix + 4) {  // one rule, not a copy per item
    const RuleId rule = builder_.add_rule("(item)", true);
    builder_.define(rule, rest);
    rest = builder_.rule(rule);
  }
  // Node 2i: i items written; node 2i + 1: about to write item i. Node 2 * counted + 1: closed.
  Graph graph;
  const uint32_t closed = 2 * counted + 1;
  graph.num_nodes = closed + 1;
  for (uint32_t i = 0; i <= counted; ++i) {
    if (i >= min) graph.edges.push_back({2 * i, closed, i == 0 ? builder_.empty() : json_.space()});
    if (i == counted) continue;
    graph.edges.push_back({2 * i, 2 * i + 1, i == 0 ? builder_.empty() : json_.comma()});
    graph.edges.push_back({2 * i + 1, 2 * i + 2, i < num_prefix ? item_of(i) : rest});
  }
  if (max == kUnbounded)
    graph.edges.push_back({2 * counted, 2 * counted, builder_.sequence({json_.comma(), rest})});
  graph.accepting = {closed};
  return builder_.sequence(
      {builder_.bytes("["), json_.space(), builder_.graph(std::move(graph)), builder_.bytes("]")});
}

// The names that all propertyNames allow; nothing when there is no such keyword.
std::optional<CharDfa> SchemaCompiler::names_of(const Conjunction& schemas) {
  std::optional<CharDfa> dfa;
  for (const Json* schema : schemas) {
    if (!schema->contains("propertyNames")) continue;
    const std::string what = "schema: " + document_.pointer(*schema) + "/propertyNames";
    const auto restrict_to = [&](const CharDfa& other) {
      dfa = dfa ? dfa->intersection(other, what) : other;
    };
    Open open;
    if (!add(open, document_.child(*schema, "propertyNames"), -1) || !follow(open)) {
      restrict_to(CharDfa::of_texts({}, what));
      continue;
    }
    if (!open.groups.empty())
      document_.refuse(*schema, "propertyNames", "anyOf and oneOf are not supported here");
    Conjunction parts;
    for (const Open::Item& item : open.items) parts.push_back(item.schema);
    if ((types_of(parts) & kString) == 0) restrict_to(CharDfa::of_texts({}, what));
    if (const auto values = values_of(parts)) {
      std::vector<std::string> texts;
      for (const Json* value : *values) {
        if (value->is_string()) texts.push_back(value->get<std::string>());
      }
      restrict_to(CharDfa::of_texts(texts, what));
    }
    if (parts.empty()) continue;
    if (const std::optional<CharDfa> strings = string_dfa(parts, true)) restrict_to(*strings);
  }
  return dfa;
}

// What the value of this property must satisfy.
Conjunction SchemaCompiler::schemas_for(const Conjunction& schemas, const std::string& name) {
  Conjunction parts;
  for (const Json* schema : schemas) {
    bool is_named = false;
    if (const Json* property = document_.property(*schema, name)) {
      parts.push_back(property);
      is_named = true;
    }
    if (const Json* patterns = document_.object(*schema, "patternProperties")) {
      for (const auto& item : patterns->items()) {
        if (!pattern_dfa(*schema, "patternProperties", item.key()).matches(name)) continue;
        parts.push_back(&document_.child(*schema, "patternProperties", item.key()));
        is_named = true;
      }
    }
    if (!is_named && schema->contains("additionalProperties"))
      parts.push_back(&document_.child(*schema, "additionalProperties"));
  }
  for (const Json* part : parts) document_.check(*part);
  return parts;
}

// Whether an object has the properties that are named and no others: some are, and nothing is said of others
// (strictly: nothing but that there may be some).
// An object of which nothing at all is said may hold anything: there would be nothing to write.
bool SchemaCompiler::names_all(const Conjunction& schemas) const {
  if (objects_ == Objects::kOpen) return false;
  const auto some_has = [&](const char* key) {
    return std::any_of(schemas.begin(), schemas.end(),
                       [&](const Json* schema) { return schema->contains(key); });
  };
  const bool speaks_of_others = std::any_of(schemas.begin(), schemas.end(), [&](const Json* schema) {
    const auto others = schema->find("additionalProperties");
    if (others == schema->end()) return false;
    return objects_ != Objects::kStrict || !allows_anything(*others);
  });
  return !speaks_of_others &&
         (some_has("properties") || some_has("patternProperties") || some_has("required"));
}

std::vector<SchemaCompiler::Property> SchemaCompiler::properties_of(const Conjunction& schemas) {
  std::vector<Property> properties;
  std::map<std::string, size_t> index_of;
  const auto property = [&](const std::string& name) -> Property& {
    const auto [it, is_new] = index_of.try_emplace(name, properties.size());
    if (is_new) properties.push_back({name, 0, false});
    if (properties.size() > kMaxProperties)
      document_.refuse(*schemas[0], "properties", "has more than {} properties", kMaxProperties);
    return properties[it->second];
  };
  for (const Json* schema : schemas) {
    if (const Json* named = document_.object(*schema, "properties")) {
      for (const auto& item : named->items()) property(item.key());
    }
  }
  for (const Json* schema : schemas) {
    const Json* required = document_.array(*schema, "required");
    if (required == nullptr) continue;
    for (const Json& name : *required) {
      if (!name.is_string()) document_.fail(*schema, "required", "expected the names of properties");
      property(name.get<std::string>()).required = true;
    }
  }
  for (Property& p : properties) {
    p.pair = builder_.sequence(
        {builder_.bytes(Json(p.name).dump()), json_.colon(), value_of(schemas_for(schemas, p.name))});
  }
  return properties;
}

// "name": value for any name that is not one of `properties`. Names are told apart by which patterns of
// patternProperties they match: each set of patterns has an automaton of its names and a conjunction.
ExprId SchemaCompiler::other_pairs(const Conjunction& schemas, const std::vector<Property>& properties,
                                   const std::optional<CharDfa>& allowed_names) {
  struct Pattern {
    const Json* schema = nullptr;
    std::string text = {};
  };
  std::vector<Pattern> patterns;
  for (const Json* schema : schemas) {
    if (const Json* named = document_.object(*schema, "patternProperties")) {
      for (const auto& item : named->items()) patterns.push_back({schema, item.key()});
    }
    if (patterns.size() > kMaxPatterns)
      document_.refuse(*schema, "patternProperties", "has more than {} patterns for one object",
                       kMaxPatterns);
  }
  std::vector<std::string> names;
  for (const Property& p : properties) names.push_back(p.name);
  const std::string what = "schema: " + document_.pointer(*schemas[0]);
  std::vector<ExprId> pairs;
  // Without any of the patterns it is a name that nobody gave.
  for (uint32_t chosen = names_all(schemas) ? 1 : 0; chosen < 1u << patterns.size(); ++chosen) {
    Conjunction parts;
    for (const Json* schema : schemas) {
      bool is_matched = false;
      for (size_t i = 0; i < patterns.size(); ++i) {
        if (patterns[i].schema != schema || (chosen >> i & 1) == 0) continue;
        parts.push_back(&document_.child(*schema, "patternProperties", patterns[i].text));
        is_matched = true;
      }
      if (!is_matched && schema->contains("additionalProperties"))
        parts.push_back(&document_.child(*schema, "additionalProperties"));
    }
    for (const Json* part : parts) document_.check(*part);
    const bool is_never = std::any_of(parts.begin(), parts.end(), [](const Json* part) {
      return part->is_boolean() && !part->get<bool>();
    });
    if (is_never) continue;
    ExprId key = json_.string();
    if (!names.empty() || !patterns.empty() || allowed_names) {
      CharDfa dfa = CharDfa::of_texts(names, what).complement();
      if (allowed_names) dfa = dfa.intersection(*allowed_names, what);
      for (size_t i = 0; i < patterns.size(); ++i) {
        const CharDfa& matched = pattern_dfa(*patterns[i].schema, "patternProperties", patterns[i].text);
        dfa = dfa.intersection((chosen >> i & 1) != 0 ? matched : matched.complement(), what);
      }
      if (dfa.empty()) continue;
      key = json_.quoted(dfa.expression(builder_, true));
    }
    pairs.push_back(builder_.sequence({key, json_.colon(), value_of(parts)}));
  }
  return builder_.choice(std::move(pairs));
}

ExprId SchemaCompiler::object_of(const Conjunction& schemas) {
  uint32_t min = 0, max = kUnbounded;
  const Json* counting = schemas[0];
  for (const Json* schema : schemas) {
    if (const auto n = document_.count(*schema, "minProperties"); n && *n > min) {
      min = *n;
      counting = schema;
    }
    if (const auto n = document_.count(*schema, "maxProperties")) max = std::min(max, *n);
  }
  if (max < min) return builder_.nothing();
  const bool is_any = std::none_of(schemas.begin(), schemas.end(), [](const Json* schema) {
    return schema->contains("properties") || schema->contains("patternProperties") ||
           schema->contains("additionalProperties") || schema->contains("required") ||
           schema->contains("propertyNames");
  });
  if (is_any && min == 0 && max == kUnbounded) return json_.object();
  const std::optional<CharDfa> names = names_of(schemas);
  std::vector<Property> properties = properties_of(schemas);
  const ExprId others = other_pairs(schemas, properties, names);
  for (Property& p : properties) {
    if (names && !names->matches(p.name)) p.pair = builder_.nothing();
  }
  const auto num_required = static_cast<uint32_t>(
      std::count_if(properties.begin(), properties.end(), [](const Property& p) { return p.required; }));
  if (min <= num_required) min = 0;
  // The names of other properties may repeat, and then they count once: only the first is sure to be new.
  if (min > 1 && others != builder_.nothing())
    document_.refuse(*counting, "minProperties", "is not supported where further properties may come");
  if (max != kUnbounded && max > properties.size() && others == builder_.nothing()) max = kUnbounded;
  const uint64_t counted = std::max(min, max == kUnbounded ? 1 : max);
  if ((properties.size() + 2) * (counted + 1) > kMaxObjectNodes)
    document_.refuse(*counting, max == kUnbounded ? "minProperties" : "maxProperties",
                     "counts too many properties");
  return builder_.sequence({builder_.bytes("{"), json_.space(), property_graph(properties, others, min, max),
                            builder_.bytes("}")});
}

// Nodes: decide(i, c): properties before i are dealt with, c were written; write(i, c): the next is property
// i, with it c are written. i = n stands for the others. Counts stop at the largest that makes a difference.
ExprId SchemaCompiler::property_graph(const std::vector<Property>& properties, ExprId others, uint32_t min,
                                      uint32_t max) {
  const auto n = static_cast<uint32_t>(properties.size());
  const uint32_t last = std::max(min, max == kUnbounded ? 1 : max);
  const uint32_t width = last + 1;
  const auto decide = [&](uint32_t i, uint32_t c) { return (i * width + c) * 2; };
  const auto write = [&](uint32_t i, uint32_t c) { return (i * width + c) * 2 + 1; };
  Graph graph;
  graph.num_nodes = (n + 1) * width * 2 + 1;
  const uint32_t closed = graph.num_nodes - 1;
  for (uint32_t i = 0; i <= n; ++i) {
    for (uint32_t c = 0; c <= last; ++c) {
      if (i < n && !properties[i].required)
        graph.edges.push_back({decide(i, c), decide(i + 1, c), builder_.empty()});
      if (c >= max && max != kUnbounded) continue;
      graph.edges.push_back(
          {decide(i, c), write(i, std::min(c + 1, last)), c == 0 ? builder_.empty() : json_.comma()});
    }
    for (uint32_t c = 1; c <= last; ++c) {
      graph.edges.push_back(
          {write(i, c), decide(std::min(i + 1, n), c), i < n ? properties[i].pair : others});
    }
  }
  for (uint32_t c = min; c <= last; ++c) {
    graph.edges.push_back({decide(n, c), closed, c == 0 ? builder_.empty() : json_.space()});
  }
  graph.start = decide(0, 0);
  graph.accepting = {closed};
  return builder_.graph(std::move(graph));
}

}  // namespace millrace::grammar
