// The tests that stand behind `is`.
#pragma once

#include <string_view>

#include "jinja/value.h"

namespace millrace::jinja {

// Null where there is no such test.
Native find_test(std::string_view name);

}  // namespace millrace::jinja
