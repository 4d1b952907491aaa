// Bodies parsed within limits and the fields of objects; see json_fields.h.
#include "json_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "api_error.h"
#include "base/json_tree.h"
#include "base/work_budget.h"

namespace millrace::server {

namespace {

std::string_view kind_of(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::object:
      return "an object";
    case Json::value_t::array:
      return "an array";
    case Json::value_t::string:
      return "a string";
    case Json::value_t::boolean:
      return "a boolean";
    default:
      return "a number";
  }
}

}  // namespace

Json parse_json(std::string_view text) {
  if (text.empty()) throw ApiError(400, "the body is empty, expected a JSON object", "", "invalid_json");
  try {
    return parse_json_tree(text, {.depth = kMaxNesting});
  } catch (const JsonTextError& error) {
    throw ApiError(
        400, fmt::format("the body {}: {}", error.limit() ? "is refused" : "is no valid JSON", error.what()),
        "", "invalid_json");
  }
}

Json parse_object(std::string_view text) {
  Json parsed = parse_json(text);
  if (!parsed.is_object()) {
    throw ApiError(400, fmt::format("the body is {}, expected a JSON object", kind_of(parsed)), "",
                   "invalid_json");
  }
  return parsed;
}

void wrong_type(const std::string& path, const Json& found, std::string_view expected) {
  throw ApiError(400, fmt::format("'{}': found {}, expected {}", path, kind_of(found), expected), path,
                 "invalid_type");
}

void bad_field(const std::string& path, std::string_view problem, std::string_view code) {
  throw ApiError(400, fmt::format("'{}': {}", path, problem), path,
                 std::string(code.empty() ? "invalid_value" : code));
}

std::string element_path(const std::string& path, size_t index) { return fmt::format("{}[{}]", path, index); }

Fields::Fields(const Json& object, std::string path) : object_(&object), path_(std::move(path)) {
  if (!object.is_object()) wrong_type(path_, object, "an object");
}

std::string Fields::path_of(std::string_view key) const {
  return path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
}

const Json* Fields::find(std::string_view key) const {
  spend_work(1 + object_->size() / 4);
  const auto at = object_->find(key);
  return at == object_->end() || at->is_null() ? nullptr : &*at;
}

namespace {

template <typename Number>
[[noreturn]] void out_of_range(const std::string& path, Number number, int64_t min, int64_t max) {
  const bool above = static_cast<double>(number) > static_cast<double>(min);
  bad_field(path, fmt::format("found {}, expected {} to {}", number, min, max),
            above ? "integer_above_max_value" : "integer_below_min_value");
}

}  // namespace

std::optional<bool> Fields::boolean(std::string_view key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) wrong_type(path_of(key), *value, "a boolean");
  return value->get<bool>();
}

std::optional<double> Fields::number(std::string_view key, double min, double max) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) wrong_type(path_of(key), *value, "a number");
  const auto number = value->get<double>();
  if (!(number >= min && number <= max)) {
    bad_field(path_of(key), fmt::format("found {}, expected {} to {}", number, min, max),
              number > max ? "decimal_above_max_value" : "decimal_below_min_value");
  }
  return number;
}

std::optional<int64_t> Fields::integer(std::string_view key, int64_t min, int64_t max) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) wrong_type(path_of(key), *value, "an integer");
  if (value->is_number_float()) {
    const auto number = value->get<double>();
    if (number != std::floor(number)) refuse(key, fmt::format("found {}, expected an integer", number));
    if (!(number >= static_cast<double>(min) && number <= static_cast<double>(max)) ||
        std::abs(number) > 9e18) {
      out_of_range(path_of(key), number, min, max);
    }
    return static_cast<int64_t>(number);
  }
  if (value->is_number_unsigned()) {
    const auto number = value->get<uint64_t>();
    if (number > static_cast<uint64_t>(std::max<int64_t>(max, 0)) || static_cast<int64_t>(number) < min) {
      out_of_range(path_of(key), number, min, max);
    }
    return static_cast<int64_t>(number);
  }
  const auto number = value->get<int64_t>();
  if (number < min || number > max) out_of_range(path_of(key), number, min, max);
  return number;
}

std::optional<std::string> Fields::text(std::string_view key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) wrong_type(path_of(key), *value, "a string");
  return value->get<std::string>();
}

std::optional<std::string> Fields::choice(std::string_view key,
                                          std::initializer_list<std::string_view> names) const {
  std::optional<std::string> value = text(key);
  if (value && std::find(names.begin(), names.end(), *value) == names.end()) {
    refuse(key,
           fmt::format("found \"{}\", expected one of: {}", value->substr(0, 60), fmt::join(names, ", ")));
  }
  return value;
}

const Json* Fields::array(std::string_view key) const {
  const Json* value = find(key);
  if (value != nullptr && !value->is_array()) wrong_type(path_of(key), *value, "an array");
  return value;
}

std::optional<Fields> Fields::object(std::string_view key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  return Fields(*value, path_of(key));
}

std::string Fields::required_text(std::string_view key) const {
  std::optional<std::string> value = text(key);
  if (!value) bad_field(path_of(key), "is missing, expected a string", "missing_required_parameter");
  return *std::move(value);
}

void Fields::refuse(std::string_view key, std::string_view problem) const {
  bad_field(path_of(key), problem);
}

}  // namespace millrace::server
