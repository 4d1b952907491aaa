#include "chat/typescript.h"

#include <optional>
#include <set>

#include "base/utf8.h"
#include "chat/json_text.h"

namespace millrace::chat {
namespace {

using Json = nlohmann::ordered_json;

const Json* member(const Json& value, const char* key) {
  if (!value.is_object()) return nullptr;
  const auto it = value.find(key);
  return it == value.end() ? nullptr : &*it;
}

const Json* array_member(const Json& value, const char* key) {
  const Json* found = member(value, key);
  return found && found->is_array() ? found : nullptr;
}

std::optional<std::string> string_member(const Json& value, const char* key) {
  const Json* found = member(value, key);
  if (!found || !found->is_string()) return std::nullopt;
  return found->get<std::string>();
}

bool is_enum(const Json& schema) {
  const Json* values = array_member(schema, "enum");
  return values && !values->empty();
}

// "default: ..." or nothing. Strings are quoted, those of an enum only where a oneOf stands alone.
std::optional<std::string> default_comment(const Json& schema, bool enum_quoted = false) {
  const Json* value = member(schema, "default");
  if (!value) return std::nullopt;
  if (!value->is_string()) return "default: " + compact_json(*value);
  if (!is_enum(schema)) return "default: \"" + value->get<std::string>() + "\"";
  return "default: " + (enum_quoted ? compact_json(*value) : value->get<std::string>());
}

std::string nullable_type(const Json& schema, const std::string& indent) {
  std::string type = typescript_type(schema, indent);
  const Json* nullable = member(schema, "nullable");
  if (nullable && nullable->is_boolean() && nullable->get<bool>() && type.find("null") == std::string::npos) {
    type += " | null";
  }
  return type;
}

std::string trailing_comment(const std::optional<std::string>& description,
                             const std::optional<std::string>& default_value) {
  if (!description && !default_value) return "";
  std::string out = " // ";
  if (description) out += *description;
  if (description && default_value) out += ' ';
  if (default_value) out += *default_value;
  return out;
}

// A oneOf that is no property: the variants below each other, each with its comment.
std::string union_type(const Json& variants, const std::string& indent) {
  std::string out;
  for (const Json& variant : variants) {
    out += "\n" + indent + " | " + nullable_type(variant, indent + "   ");
    out += trailing_comment(string_member(variant, "description"), default_comment(variant, true));
  }
  return out;
}

// A property that is a oneOf. Its description goes above unless the first variant says the same; a variant's
// goes behind it unless it was said above.
std::string union_property(const std::string& name, const Json& schema, const Json& variants,
                           const std::string& indent) {
  const std::optional<std::string> description = string_member(schema, "description");
  const bool first_says_it =
      description && !variants.empty() && string_member(variants.front(), "description") == description;
  const bool above = description && !first_says_it;
  std::string out;
  if (above) out += indent + "// " + *description + "\n";
  if (const auto value = default_comment(schema)) out += indent + "// " + *value + "\n";
  out += indent + name + ":\n";
  bool first = true;
  for (const Json& variant : variants) {
    std::optional<std::string> own = string_member(variant, "description");
    if (own == description || (first && above)) own.reset();
    out += indent + " | " + nullable_type(variant, indent + "   ");
    out += trailing_comment(own, default_comment(variant)) + "\n";
    first = false;
  }
  return out + indent + ",\n";
}

// Title, description and examples stand above a property.
std::string property_comments(const Json& schema, const std::string& indent) {
  std::string out;
  if (const auto title = string_member(schema, "title")) {
    out += indent + "// " + *title + "\n" + indent + "//\n";
  }
  if (!member(schema, "oneOf")) {
    if (const auto description = string_member(schema, "description")) {
      out += indent + "// " + *description + "\n";
    }
  }
  const Json* examples = array_member(schema, "examples");
  if (examples && !examples->empty()) {
    out += indent + "// Examples:\n";
    for (const Json& example : *examples) {
      if (example.is_string()) out += indent + "// - \"" + example.get<std::string>() + "\"\n";
    }
  }
  return out;
}

std::string property(const std::string& name, const Json& schema, const std::string& indent) {
  std::string out = property_comments(schema, indent);
  if (const Json* variants = array_member(schema, "oneOf")) {
    return out + union_property(name, schema, *variants, indent);
  }
  out += indent + name + ": " + nullable_type(schema, indent + "    ") + ",";
  if (!member(schema, "oneOf")) {
    if (const auto value = default_comment(schema)) out += " // " + *value;
  }
  return out + "\n";
}

std::string object_type(const Json& schema, const std::string& indent) {
  std::string out;
  if (const auto description = string_member(schema, "description")) {
    out += indent + "// " + *description + "\n";
  }
  out += "{\n";
  std::set<std::string> required;
  if (const Json* names = array_member(schema, "required")) {
    for (const Json& name : *names) {
      if (name.is_string()) required.insert(name.get<std::string>());
    }
  }
  if (const Json* properties = member(schema, "properties"); properties && properties->is_object()) {
    for (const auto& [name, value] : properties->items()) {
      out += property(required.count(name) > 0 ? name : name + "?", value, indent);
    }
  }
  return out + indent + "}";
}

std::string joined(const std::vector<std::string>& parts, const char* separator) {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i) out += (i > 0 ? separator : "") + parts[i];
  return out;
}

std::string string_type(const Json& schema) {
  std::vector<std::string> values;
  if (const Json* listed = array_member(schema, "enum")) {
    for (const Json& value : *listed) {
      if (value.is_string()) values.push_back("\"" + value.get<std::string>() + "\"");
    }
  }
  return values.empty() ? "string" : joined(values, " | ");
}

// Each line of a text behind "// "; a last line that is empty does not count.
void append_comment(std::string_view text, std::string& out) {
  while (!text.empty()) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    if (end != std::string_view::npos && !line.empty() && line.back() == '\r') line.remove_suffix(1);
    out += "// ";
    out += line;
    out += '\n';
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
}

}  // namespace

std::string typescript_type(const Json& schema, const std::string& indent) {
  if (const Json* variants = array_member(schema, "oneOf")) return union_type(*variants, indent);
  if (const Json* types = array_member(schema, "type")) {
    std::vector<std::string> names;
    for (const Json& type : *types) {
      if (type.is_string()) names.push_back(type == "integer" ? "number" : type.get<std::string>());
    }
    if (!names.empty()) return joined(names, " | ");
  }
  const std::string type = string_member(schema, "type").value_or("");
  if (type == "object") return object_type(schema, indent);
  if (type == "string") return string_type(schema);
  if (type == "number" || type == "integer") return "number";
  if (type == "boolean") return "boolean";
  if (type == "array") {
    const Json* items = member(schema, "items");
    return items ? typescript_type(*items, indent) + "[]" : "Array<any>";
  }
  return "any";
}

std::string typescript_tools(const std::vector<Tool>& tools) {
  std::string out = "# Tools\n\n## functions\n\nnamespace functions {\n\n";
  for (const Tool& tool : tools) {
    append_comment(valid_utf8(tool.description), out);
    out += "type " + valid_utf8(tool.name) + " = (";
    if (!tool.parameters.empty()) {
      out += "_: " + typescript_type(parse_json(tool.parameters, "parameters of tool " + tool.name), "");
    }
    out += ") => any;\n\n";
  }
  return out + "} // namespace functions";
}

}  // namespace millrace::chat
