// The methods of str that templates call.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "jinja/value.h"

namespace millrace::jinja {

// Null where there is no such method.
Native find_text_method(std::string_view name);
// str.replace: at most `limit` times where that is not negative.
std::string replace_text(std::string_view text, std::string_view from, std::string_view to, int64_t limit);

}  // namespace millrace::jinja
