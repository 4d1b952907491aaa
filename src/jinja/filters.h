// The filters, by name: text_filters.h and sequence_filters.h.
#pragma once

#include <string_view>

#include "jinja/value.h"

namespace millrace::jinja {

// Null where there is no such filter.
Native find_filter(std::string_view name);

}  // namespace millrace::jinja
