// Values of calls that are not spelled as JSON, as JSON.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace millrace::chat {

std::string json_string(std::string_view text);

// A value between tags: a string as it stands, anything else as JSON or, where a template writes Python's
// words, as such. `is_string`: what the tool's schema or the tag says; nothing: neither does.
std::string tagged_value(std::string_view text, std::optional<bool> is_string);

// "city='Oslo', days=[1, None]" as {"city": "Oslo", "days": [1, null]}; nothing: that is no list of
// arguments.
std::optional<std::string> python_arguments(std::string_view text);

}  // namespace millrace::chat
