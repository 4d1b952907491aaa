#include "grammar/schema_document.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/json_tree.h"
#include "base/work_budget.h"
#include "grammar/expression.h"

namespace millrace::grammar {
namespace {

constexpr size_t kMaxSchemaDepth = 512;  // of nesting in the text
constexpr size_t kMaxPointer = 4000;

// Keywords that restrict and are not understood. All others that are not understood are notes, as JSON Schema
// itself says of unknown keywords.
constexpr std::array kRefused = {"if",
                                 "then",
                                 "else",
                                 "contains",
                                 "minContains",
                                 "maxContains",
                                 "dependentRequired",
                                 "dependentSchemas",
                                 "dependencies",
                                 "unevaluatedItems",
                                 "unevaluatedProperties",
                                 "$dynamicRef",
                                 "$recursiveRef"};

std::string escaped(std::string_view name) {
  std::string out;
  for (const char c : name) {
    if (c == '~') {
      out += "~0";
    } else if (c == '/') {
      out += "~1";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("%{:02X}", c);
    } else {
      out += c;
    }
  }
  return out;
}

// As it may stand in a message.
std::string shown(std::string_view text) {
  constexpr size_t kMaxShown = 80;
  std::string out;
  for (const char c : text.substr(0, kMaxShown)) out += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  return out;
}

// One step of a JSON pointer in a URI: %xx, then ~1 and ~0. Nothing for what is not one.
std::optional<std::string> unescaped(std::string_view step) {
  const auto hex = [](char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
  };
  std::string bytes;
  for (size_t i = 0; i < step.size(); ++i) {
    if (step[i] != '%') {
      bytes += step[i];
      continue;
    }
    if (i + 2 >= step.size() || hex(step[i + 1]) < 0 || hex(step[i + 2]) < 0) return std::nullopt;
    bytes += static_cast<char>(hex(step[i + 1]) * 16 + hex(step[i + 2]));
    i += 2;
  }
  std::string out;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != '~') {
      out += bytes[i];
      continue;
    }
    if (i + 1 >= bytes.size() || (bytes[i + 1] != '0' && bytes[i + 1] != '1')) return std::nullopt;
    out += bytes[++i] == '0' ? '~' : '/';
  }
  return out;
}

}  // namespace

SchemaDocument::SchemaDocument(std::string_view text) {
  try {
    root_ = parse_json_tree(text, {.depth = kMaxSchemaDepth, .last_key_wins = true});
  } catch (const JsonTextError& error) {
    if (error.limit()) throw_error(ErrorCode::kUnsupported, "schema: {}", error.what());
    throw_error(ErrorCode::kBadInput, "schema: offset {}: not JSON", error.byte());
  }
  pointers_.emplace(&root_, "#");
}

std::string SchemaDocument::pointer(const Json& schema) const {
  const auto it = pointers_.find(&schema);
  return it != pointers_.end() ? it->second : "#";
}

std::string SchemaDocument::place(const Json& schema, std::string_view key) const {
  std::string where = "schema: " + pointer(schema);
  if (!key.empty()) where += "/" + escaped(key);
  return where + ": ";
}

const Json& SchemaDocument::remember(const Json& part, std::string pointer) {
  if (pointer.size() > kMaxPointer)
    throw_error(ErrorCode::kUnsupported, "schema: {}...: nested too deep", pointer.substr(0, 60));
  pointers_.try_emplace(&part, std::move(pointer));
  return part;
}

const Json& SchemaDocument::child(const Json& schema, std::string_view key) {
  return remember(*schema.find(key), pointer(schema) + "/" + escaped(key));
}

const Json& SchemaDocument::child(const Json& schema, std::string_view key, size_t index) {
  return remember((*schema.find(key))[index], fmt::format("{}/{}/{}", pointer(schema), escaped(key), index));
}

const Json& SchemaDocument::child(const Json& schema, std::string_view key, const std::string& name) {
  return remember(*schema.find(key)->find(name), pointer(schema) + "/" + escaped(key) + "/" + escaped(name));
}

const Json* SchemaDocument::property(const Json& schema, const std::string& name) {
  const Json* const properties = object(schema, "properties");
  if (properties == nullptr) return nullptr;
  const auto [index, is_new] = properties_.try_emplace(properties);
  if (is_new) {
    for (const auto& [key, part] : properties->get_ref<const Json::object_t&>())
      index->second.emplace(key, &part);
  }
  const auto it = index->second.find(name);
  if (it == index->second.end()) return nullptr;
  return &remember(*it->second, pointer(schema) + "/properties/" + escaped(name));
}

const Json& SchemaDocument::resolve(const Json& schema) {
  const std::string& ref = *string(schema, "$ref");
  if (!ref.starts_with('#'))
    refuse(schema, "$ref", "refers to '{}', only parts of this document ('#/...') can be", shown(ref));
  if (ref.size() > 1 && ref[1] != '/')
    refuse(schema, "$ref", "refers to the anchor '{}', only '#' and '#/...' are supported", shown(ref));
  const Json* at = &root_;
  for (size_t begin = 2; begin <= ref.size() && ref.size() > 1;) {
    const size_t end = std::min(ref.find('/', begin), ref.size());
    const std::optional<std::string> step = unescaped(std::string_view(ref).substr(begin, end - begin));
    if (!step) fail(schema, "$ref", "found '{}', expected a JSON pointer", shown(ref));
    if (at != &root_ && at->is_object() && at->contains("$id") && (*at)["$id"].is_string())
      refuse(schema, "$ref", "leads through a part with an $id of its own");
    const Json* next = nullptr;
    if (at->is_object()) {
      const auto it = at->find(*step);
      if (it != at->end()) next = &*it;
    } else if (at->is_array() && !step->empty() && step->size() < 8 &&
               std::all_of(step->begin(), step->end(), [](char c) { return c >= '0' && c <= '9'; })) {
      const size_t index = std::stoul(*step);
      if (index < at->size()) next = &(*at)[index];
    }
    if (next == nullptr) fail(schema, "$ref", "refers to '{}', which is not there", shown(ref));
    at = next;
    begin = end + 1;
  }
  return remember(*at, ref);
}

std::optional<uint32_t> SchemaDocument::count(const Json& schema, std::string_view key) const {
  const auto it = schema.find(key);
  if (it == schema.end()) return std::nullopt;
  const double value = it->is_number() ? it->get<double>() : -1;
  if (value < 0 || value != std::floor(value)) fail(schema, key, "expected a count, 0 or more");
  return value >= kUnbounded ? kUnbounded : static_cast<uint32_t>(value);
}

const Json* SchemaDocument::number(const Json& schema, std::string_view key) const {
  const auto it = schema.find(key);
  if (it == schema.end()) return nullptr;
  if (!it->is_number() || !std::isfinite(it->get<double>())) fail(schema, key, "expected a number");
  return &*it;
}

const std::string* SchemaDocument::string(const Json& schema, std::string_view key) const {
  const auto it = schema.find(key);
  if (it == schema.end()) return nullptr;
  if (!it->is_string()) fail(schema, key, "expected a string");
  return it->get_ptr<const std::string*>();
}

const Json* SchemaDocument::array(const Json& schema, std::string_view key) const {
  const auto it = schema.find(key);
  if (it == schema.end()) return nullptr;
  if (!it->is_array()) fail(schema, key, "expected an array");
  return &*it;
}

const Json* SchemaDocument::object(const Json& schema, std::string_view key) const {
  const auto it = schema.find(key);
  if (it == schema.end()) return nullptr;
  if (!it->is_object()) fail(schema, key, "expected an object");
  return &*it;
}

void SchemaDocument::check(const Json& schema) {
  if (!checked_.try_emplace(&schema, true).second) return;
  spend_work(20 + schema.size());
  if (schema.is_boolean()) return;
  if (!schema.is_object()) fail(schema, "", "found {}, expected a schema", schema.type_name());
  for (const char* key : kRefused) {
    if (schema.contains(key)) refuse(schema, key, "'{}' is not supported", key);
  }
  if (&schema != &root_ && schema.contains("$id") && schema["$id"].is_string())
    refuse(schema, "$id", "a part with an $id of its own is not supported");
  if (&schema == &root_ && schema.contains("$schema")) {
    const std::string& dialect = *string(schema, "$schema");
    if (!dialect.starts_with("http://json-schema.org/") && !dialect.starts_with("https://json-schema.org/"))
      refuse(schema, "$schema", "a dialect other than JSON Schema's own is not supported");
  }
  if (const auto it = schema.find("uniqueItems"); it != schema.end()) {
    if (!it->is_boolean()) fail(schema, "uniqueItems", "expected true or false");
  }
}

}  // namespace millrace::grammar
