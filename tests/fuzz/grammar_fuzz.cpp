// Any bytes as a JSON schema ('j' first), a regular expression ('r'), a grammar ('g') or one of Lark's ('l'):
// an Error of one line, or an automaton under which a model with random weights never gets stuck.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "grammar/grammar.h"
#include "grammar/lark.h"
#include "grammar/test_walk.h"

namespace {

namespace grammar = millrace::grammar;

std::shared_ptr<const grammar::Grammar> compile(char kind, std::string_view text) {
  switch (kind) {
    case 'r':
      return grammar::compile_regex(text);
    case 'l':
      return grammar::compile_regex(grammar::lark_to_regex(text));
    case 'g':
      return grammar::compile_gbnf(text);
    default:
      return grammar::compile_json_schema(text);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<std::string> tokens = grammar::test_tokens();
  static const auto vocabulary = grammar::make_vocabulary(tokens);
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    const auto compiled = compile(static_cast<char>(data[0]), text);
    // Throws when a mask is empty or an allowed token is not accepted: both are faults here.
    const grammar::WalkResult walk =
        grammar::random_walk(compiled, vocabulary, tokens, size, /*patience=*/8, /*max_tokens=*/24);
    if (walk.ended && !grammar::matches(*compiled, walk.text)) __builtin_trap();
  } catch (const millrace::Error& error) {
    const std::string_view message = error.what();
    if (!message.starts_with("schema: ") && !message.starts_with("regex: ") &&
        !message.starts_with("grammar: ") && !message.starts_with("lark: ")) {
      __builtin_trap();
    }
    for (const char c : message) {
      if (static_cast<unsigned char>(c) < 0x20) __builtin_trap();
    }
  }
  return 0;
}
