// The global functions: range, dict, namespace, raise_exception, strftime_now.
#pragma once

#include <string_view>

#include "jinja/value.h"

namespace millrace::jinja {

// Null where there is no such function.
Native find_global(std::string_view name);

}  // namespace millrace::jinja
