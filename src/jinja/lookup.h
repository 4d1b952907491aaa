// Attributes, items and slices of values: Python's rules as jinja2's sandbox applies them.
#pragma once

#include <string_view>

#include "jinja/value.h"

namespace millrace::jinja {

Value get_attribute(const Value& object, std::string_view name);
Value get_item(const Value& object, const Value& key);
Value get_slice(const Value& object, const Value& start, const Value& stop, const Value& step);
// a.b.0 as the filters' attribute= arguments say it.
Value get_path(const Value& object, const Value& path);

}  // namespace millrace::jinja
