// Attributes, items and slices: what a template may look up, and what it gets where there is nothing.
#include "jinja/lookup.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "jinja/big_integer.h"
#include "jinja/methods.h"
#include "jinja/print.h"
#include "jinja/python_text.h"
#include "jinja/render_state.h"

namespace millrace::jinja {
namespace {

std::string describe_object(const Value& object) {
  return object.is_none() ? "None" : type_name(object) + " object";
}

// What Python's getattr() finds; null where it raises AttributeError.
std::optional<Value> find_attribute(const Value& object, std::string_view name) {
  switch (object.kind()) {
    case Kind::kNamespace: {
      const Value* value = object.as_namespace().find(name);
      return value == nullptr ? std::nullopt : std::optional<Value>(*value);
    }
    case Kind::kLoop:
      return loop_attribute(object, name);
    case Kind::kMacro:
      if (name == "name") return Value::string(macro_name(object));
      return std::nullopt;
    case Kind::kTuple:
      if (object.as_sequence().label == "group" && name == "grouper") return object.items()[0];
      if (object.as_sequence().label == "group" && name == "list") return object.items()[1];
      break;
    default:
      break;
  }
  if (is_mutating_method(object, name)) {
    return Value::undefined(
        fmt::format("access to attribute '{}' of '{}' object is unsafe.", name, type_name(object)));
  }
  Native method = find_method(object, name);
  if (method == nullptr) return std::nullopt;
  return Value::object(Kind::kFunction, std::make_shared<FunctionObject>(std::string(name), method, object));
}

Value missing_attribute(const Value& object, std::string_view name) {
  return Value::undefined(fmt::format("'{}' has no attribute '{}'", describe_object(object), name));
}

bool is_key(const Value& key) {
  if (!key.is(Kind::kTuple)) return !key.is(Kind::kList) && !key.is(Kind::kDict) && !key.is(Kind::kView);
  for (const Value& part : key.items()) {
    if (!is_key(part)) return false;
  }
  return true;
}

std::optional<Value> find_index(const Value& object, int64_t index) {
  bool indexable =
      object.is_string() || object.is(Kind::kList) || object.is(Kind::kTuple) || object.is(Kind::kRange);
  if (!indexable) return std::nullopt;
  int64_t length = *length_of(object);
  if (index < 0) index += length;
  if (index < 0 || index >= length) return std::nullopt;
  if (!object.is_string()) return object.items()[static_cast<size_t>(index)];
  const std::string& text = object.text();
  Budget::spend(1 + static_cast<size_t>(index) / 64);
  bool ascii = static_cast<int64_t>(text.size()) == length;
  size_t begin = ascii ? static_cast<size_t>(index) : byte_offset(text, index);
  size_t end = begin;
  next_code_point(text, end);
  return Value::string(text.substr(begin, end - begin), object.is_markup());
}

}  // namespace

Value get_attribute(const Value& object, std::string_view name) {
  if (object.is_undefined()) fail_undefined(object);
  if (std::optional<Value> value = find_attribute(object, name)) return *value;
  if (object.is(Kind::kDict)) {
    if (const Value* value = object.dict().find(name)) return *value;
  }
  return missing_attribute(object, name);
}

Value get_item(const Value& object, const Value& key) {
  if (object.is_undefined()) fail_undefined(object);
  if (object.is(Kind::kDict)) {
    if (const Value* value = is_key(key) ? object.dict().find(key) : nullptr) return *value;
  } else if (key.is_integral()) {
    if (std::optional<Value> value = find_index(object, key.as_int())) return *value;
  }
  if (key.is_string()) {
    if (std::optional<Value> value = find_attribute(object, key.text())) return *value;
    return missing_attribute(object, key.text());
  }
  return Value::undefined(fmt::format("{} has no element {}", describe_object(object), repr(key)));
}

Value get_path(const Value& object, const Value& path) {
  if (!path.is_string()) return path.is_none() ? object : get_item(object, path);
  Value value = object;
  std::string_view rest = path.text();
  for (;;) {
    size_t dot = rest.find('.');
    std::string part(rest.substr(0, dot));
    bool number = !part.empty() && part.size() < 18 && part.find_first_not_of("0123456789") == part.npos;
    value = get_item(value, number ? Value::integer(std::stoll(part)) : Value::string(part));
    if (dot == rest.npos) return value;
    rest.remove_prefix(dot + 1);
  }
}

namespace {

// Python's slice.indices: the positions a slice takes from something of this length.
struct SliceRange {
  int64_t start, stop, step, count;
};

SliceRange slice_range(int64_t length, const Value& start, const Value& stop, const Value& step) {
  // What 64 bits do not hold is beyond every end.
  const auto place = [](const Value& bound) {
    if (!bound.is(Kind::kBigInt)) return bound.as_int();
    return bound.as_big().negative() ? std::numeric_limits<int64_t>::min()
                                     : std::numeric_limits<int64_t>::max();
  };
  int64_t by = step.is_none() ? 1 : place(step);
  if (by == 0) fail("slice step cannot be zero");
  by = std::clamp<int64_t>(by, -length - 1, length + 1);  // a longer step takes the same items
  int64_t low = by < 0 ? -1 : 0, high = by < 0 ? length - 1 : length;
  auto clip = [&](const Value& bound, int64_t otherwise) {
    if (bound.is_none()) return otherwise;
    int64_t i = place(bound);
    return i < 0 ? std::max(i < -length ? low : i + length, low) : std::min(i, high);
  };
  int64_t from = clip(start, by < 0 ? high : low), to = clip(stop, by < 0 ? low : high);
  int64_t distance = by < 0 ? from - to : to - from;
  return {from, to, by, distance <= 0 ? 0 : (distance - 1) / std::abs(by) + 1};
}

}  // namespace

Value get_slice(const Value& object, const Value& start, const Value& stop, const Value& step) {
  if (object.is_undefined()) fail_undefined(object);
  bool sliceable =
      object.is_string() || object.is(Kind::kList) || object.is(Kind::kTuple) || object.is(Kind::kRange);
  for (const Value* bound : {&start, &stop, &step})
    sliceable = sliceable && (bound->is_none() || bound->is_whole());
  if (!sliceable) return Value::undefined(fmt::format("{} has no such slice", describe_object(object)));
  SliceRange range = slice_range(*length_of(object), start, stop, step);
  if (!object.is_string()) {
    std::vector<Value> items;
    items.reserve(static_cast<size_t>(range.count));
    for (int64_t i = 0; i < range.count; ++i)
      items.push_back(object.items()[static_cast<size_t>(range.start + i * range.step)]);
    if (object.is(Kind::kRange)) fail_unsupported("a slice of range(); range()|list has slices");
    return Value::sequence(object.kind(), std::move(items));
  }
  const std::string& text = object.text();
  Budget::spend(1 + text.size() / 64);
  if (range.step == 1) {
    size_t begin = byte_offset(text, range.start);
    size_t size = byte_offset(std::string_view(text).substr(begin), range.count);
    return Value::string(text.substr(begin, size), object.is_markup());
  }
  Budget::spend(text.size());
  std::vector<std::string_view> parts = split_code_points(text);
  std::string out;
  for (int64_t i = 0; i < range.count; ++i) out += parts[static_cast<size_t>(range.start + i * range.step)];
  return Value::string(std::move(out), object.is_markup());
}

}  // namespace millrace::jinja
