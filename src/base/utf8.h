// Text that claims to be UTF-8, made so.
#pragma once

#include <string>
#include <string_view>

namespace millrace {

// Text with U+FFFD where it is not UTF-8: JSON and templates take nothing else.
std::string valid_utf8(std::string_view text);

}  // namespace millrace
