// Regular expressions: the part of ECMA 262's and RE2's syntax that says what matches and not how it is
// searched for (docs/constrained_output.md).
#pragma once

#include <string>
#include <string_view>

#include "grammar/char_dfa.h"

namespace millrace::grammar {

// Messages say "`what`: offset N: ...". `search`: the pattern may match anywhere in the text, as JSON
// Schema's do; otherwise it matches the whole text.
CharNfa parse_regex(std::string_view pattern, bool search, const std::string& what);

}  // namespace millrace::grammar
