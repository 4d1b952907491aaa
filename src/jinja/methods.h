// The methods of values: dict, list, tuple, float and the loop variable; of str: text_methods.h.
#pragma once

#include <string_view>

#include "jinja/value.h"

namespace millrace::jinja {

// Null where there is no such method.
Native find_method(const Value& self, std::string_view name);
// list.append and its like, which the sandbox refuses.
bool is_mutating_method(const Value& self, std::string_view name);

}  // namespace millrace::jinja
