// Operators with Python's meaning, as jinja2's sandbox applies them.
#pragma once

#include "jinja/value.h"

namespace millrace::jinja {

Value binary_operator(char op, const Value& a, const Value& b);
Value unary_operator(char op, const Value& a);

}  // namespace millrace::jinja
