// What an answer may look like: a JSON schema, any JSON object, a regular expression or a grammar, compiled
// once and shared; and the token masks that hold a model to it. The languages: docs/constrained_output.md.
//
// A Grammar speaks of bytes and knows no tokens. A Vocabulary knows the bytes of every token. `constrain`
// brings the two together: the constraint allows a token exactly when its bytes can be continued to a whole
// match, and an end token exactly when what is there already is one.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "millrace/sampling.h"

namespace millrace::grammar {

class Grammar;     // compiled, immutable, shared between threads; holds the masks already computed
class Vocabulary;  // the tokens of a model as a trie of bytes; immutable, shared between threads

// What an object without additionalProperties may hold beside the properties that its schema names. JSON
// Schema says anything (kOpen); a model that is told so invents names until it is cut (kClosed: nothing).
// kStrict is closed also where additionalProperties allows anything at all.
enum class Objects { kClosed, kOpen, kStrict };

// Throw Error{kBadInput} for what is malformed and Error{kUnsupported} for what is not in the documented
// subset, both with the place: a JSON pointer into the schema, an offset into the pattern, a line of the
// grammar.
std::shared_ptr<const Grammar> compile_json_object();
std::shared_ptr<const Grammar> compile_json_schema(std::string_view schema_json,
                                                   Objects objects = Objects::kClosed);
std::shared_ptr<const Grammar> compile_regex(std::string_view pattern);  // matches the whole answer
std::shared_ptr<const Grammar> compile_gbnf(std::string_view rules);     // begins at the rule `root`

// Whether the whole text matches; whether it can be continued to one that does.
bool matches(const Grammar& grammar, std::string_view text);
bool matches_beginning(const Grammar& grammar, std::string_view text);

// bytes[t]: what token t adds to the text; empty for a token that can never be part of it (special tokens).
std::shared_ptr<const Vocabulary> make_vocabulary(const std::vector<std::string>& bytes);

// `end_tokens` become possible when the text so far matches; at that point, and only there, the constraint
// ends. The first masks of a grammar are computed as they are asked for and stay with it: a second request
// with the same Grammar and Vocabulary finds them.
//
// allowed() throws Error{kUnsupported} when the vocabulary has no token for any byte that could come next,
// accept() throws Error{kBadInput} for a token that was not allowed.
std::unique_ptr<TokenConstraint> constrain(std::shared_ptr<const Grammar> grammar,
                                           std::shared_ptr<const Vocabulary> vocabulary,
                                           std::vector<int32_t> end_tokens);

// Compiled grammars by kind and text, the least recently used dropped first. Safe from any thread; two
// threads that ask for the same new text compile it twice and share the first.
class GrammarCache {
 public:
  enum class Kind { kJsonObject, kJsonSchema, kOpenJsonSchema, kStrictJsonSchema, kRegex, kGbnf };
  // max_bytes: of texts, tables and masks together, looked at whenever a grammar is added.
  explicit GrammarCache(size_t max_grammars = 256, size_t max_bytes = size_t{512} << 20)
      : max_grammars_(max_grammars), max_bytes_(max_bytes) {}
  // Throws what the compile_ functions throw; failures are not kept. The text of kJsonObject is ignored.
  std::shared_ptr<const Grammar> get(Kind kind, std::string_view text);
  size_t size() const;

 private:
  using Key = std::pair<Kind, std::string>;
  struct Entry {
    Key key;
    std::shared_ptr<const Grammar> grammar;
  };
  size_t bytes() const;

  size_t max_grammars_, max_bytes_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  // last used first
  std::map<Key, std::list<Entry>::iterator> index_;
};

}  // namespace millrace::grammar
