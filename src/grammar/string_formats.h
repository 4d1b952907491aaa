// JSON Schema's `format` of strings, as patterns for what is generated: each text that matches is valid, not
// each valid text matches (docs/constrained_output.md).
#pragma once

#include <string_view>

namespace millrace::grammar {

// A regular expression for the whole string; empty for a format that is a note only.
std::string_view format_pattern(std::string_view format);

}  // namespace millrace::grammar
