// Cuts a template into tokens exactly as jinja2 does with trim_blocks and lstrip_blocks: white space control
// is settled here, so the parser sees only the text that will be printed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "jinja/value.h"

namespace millrace::jinja {

enum class TokenKind : uint8_t {
  kData,
  kVariableBegin,
  kVariableEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenKind kind;
  int line;
  std::string text;  // data, name, operator, or a string with its escapes resolved
  Value integer;
  double real = 0;
};

// Throws SyntaxError. The last token is kEnd.
std::vector<Token> tokenize(std::string_view source);

// Thrown by the lexer and the parser: they know the line, and ChatTemplate the file.
struct SyntaxError {
  bool unsupported;  // Jinja, but not ours
  int line;
  std::string message;
};

std::string describe(const Token& token);

}  // namespace millrace::jinja
