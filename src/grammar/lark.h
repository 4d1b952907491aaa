// Grammars as Lark writes them, as far as they are regular: rules are put in the place of their names until
// one regular expression is left (docs/constrained_output.md has the subset).
#pragma once

#include <string>
#include <string_view>

namespace millrace::grammar {

// A pattern for compile_regex, which matches what the rule `start` does. Throws Error{kBadInput} for what is
// malformed and Error{kUnsupported} for what is not in the subset: rules that call themselves, %ignore,
// templates. Messages say "lark: line N: ...".
std::string lark_to_regex(std::string_view text);

}  // namespace millrace::grammar
