// Filters on lists and dicts.
#pragma once

#include <string_view>

#include "jinja/value.h"

namespace millrace::jinja {

Native find_sequence_filter(std::string_view name);  // null where there is no such filter

}  // namespace millrace::jinja
