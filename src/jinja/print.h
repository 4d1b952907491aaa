// str() and repr() of values: what {{ }} prints.
#pragma once

#include <string>

#include "jinja/value.h"

namespace millrace::jinja {

std::string to_text(const Value& value);  // str()
std::string repr(const Value& value);

}  // namespace millrace::jinja
