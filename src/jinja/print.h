// str() and repr() of values: what {{ }} prints.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "jinja/value.h"

namespace millrace::jinja {

std::string to_text(const Value& value);  // str()
std::string repr(const Value& value);
std::string escaped_text(const Value& value);  // markup as it is, anything else with & < > " ' escaped
// Python's separator.join(items) where the autoescape statement is on: markup when the separator or an item
// is.
Value join_markup(std::string_view separator, const std::vector<Value>& items, bool separator_is_markup);

}  // namespace millrace::jinja
