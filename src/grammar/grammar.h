// What an answer may look like: a JSON schema, any JSON object, a regular expression or a grammar, compiled
// once and shared; and the token masks that hold a model to it.
//
// A Grammar speaks of bytes and knows no tokens. A Vocabulary knows the bytes of every token. `constrain`
// brings the two together: the constraint allows a token exactly when its bytes can be continued to a whole
// match, and an end token exactly when what is there already is one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "millrace/sampling.h"

namespace millrace::grammar {

class Grammar;     // compiled, immutable, shared between threads
class Vocabulary;  // the tokens of a model as a trie of bytes; immutable, shared between threads

// Throw Error{kBadInput} for what is malformed and Error{kUnsupported} for what is not in the documented
// subset, both with the place: a JSON pointer into the schema, an offset into the pattern, a line of the
// grammar.
std::shared_ptr<const Grammar> compile_json_object();
std::shared_ptr<const Grammar> compile_json_schema(std::string_view schema_json);
std::shared_ptr<const Grammar> compile_regex(std::string_view pattern);  // matches the whole answer
std::shared_ptr<const Grammar> compile_gbnf(std::string_view rules);     // begins at the rule `root`

// bytes[t]: what token t adds to the text; empty for a token that can never be part of it (special tokens).
std::shared_ptr<const Vocabulary> make_vocabulary(const std::vector<std::string>& bytes);

// `end_tokens` become possible when the text so far matches; at that point, and only there, the constraint
// ends.
std::unique_ptr<TokenConstraint> constrain(std::shared_ptr<const Grammar> grammar,
                                           std::shared_ptr<const Vocabulary> vocabulary,
                                           std::vector<int32_t> end_tokens);

}  // namespace millrace::grammar
