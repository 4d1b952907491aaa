// Parses a template into statements, with jinja2's grammar and Hugging Face's extensions (break, continue,
// generation). Constructs this interpreter lacks are refused here, with their line.
#pragma once

#include <string_view>

#include "jinja/ast.h"

namespace millrace::jinja {

// Throws SyntaxError (lexer.h).
Body parse_template(std::string_view source);

}  // namespace millrace::jinja
