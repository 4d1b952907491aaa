// Finite automata over characters, with the algebra that schemas need: a string that matches this pattern and
// that length and is none of those names is an intersection of automata and complements.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "grammar/codepoint_set.h"
#include "grammar/expression.h"

namespace millrace::grammar {

// Non-deterministic, with empty edges that may ask to be at the beginning or the end of the text.
struct CharNfa {
  struct Edge {
    enum class Kind : uint8_t { kEmpty, kAtBegin, kAtEnd, kSet } kind = Kind::kEmpty;
    uint32_t set = 0;  // into sets
    uint32_t target = 0;
  };
  std::vector<std::vector<Edge>> states = {};
  std::vector<CodepointSet> sets = {};
  uint32_t start = 0, accept = 0;

  uint32_t add_state() {
    states.emplace_back();
    return static_cast<uint32_t>(states.size() - 1);
  }
};

// Complete and deterministic. Characters that no edge tells apart are one class; state 0 is the start.
class CharDfa {
 public:
  // Throws Error{kUnsupported}, naming `what`, where it would take too many states.
  static CharDfa from_nfa(const CharNfa& nfa, const std::string& what);
  static CharDfa everything();
  static CharDfa of_texts(const std::vector<std::string>& texts, const std::string& what);  // exactly these
  static CharDfa of_lengths(uint32_t min, uint32_t max, const std::string& what);  // max may be kUnbounded
  // `digits` read from the left, an optional sign and point skipped, are a multiple of modulus / 10^places:
  // what numbers with at most `places` decimals need.
  static CharDfa of_multiples(uint32_t modulus, uint32_t places, const std::string& what);

  CharDfa complement() const;
  CharDfa intersection(const CharDfa& other, const std::string& what) const;
  CharDfa united(const CharDfa& other, const std::string& what) const;
  bool empty() const;
  bool matches(std::string_view utf8) const;
  size_t num_states() const { return accepting_.size(); }

  // As an expression; json: each character as it stands in a JSON string, escaped where it must be.
  ExprId expression(GrammarBuilder& builder, bool json) const;

 private:
  CharDfa product(const CharDfa& other, bool both, const std::string& what) const;
  uint32_t class_of(uint32_t codepoint) const;
  uint32_t& next(uint32_t state, uint32_t character_class) {
    return next_[state * num_classes_ + character_class];
  }
  uint32_t next(uint32_t state, uint32_t character_class) const {
    return next_[state * num_classes_ + character_class];
  }

  // Segment i of the code points begins at bounds_[i] and belongs to class class_of_segment_[i].
  std::vector<uint32_t> bounds_ = {0};
  std::vector<uint32_t> class_of_segment_ = {0};
  uint32_t num_classes_ = 1;
  std::vector<uint32_t> next_;  // [state][class]
  std::vector<uint8_t> accepting_;
};

// A set of characters as they stand in a JSON string: themselves, or the escapes of those that must have one.
ExprId json_characters(GrammarBuilder& builder, const CodepointSet& set);
// The automaton as it is, for patterns that have no small deterministic form.
ExprId nfa_expression(GrammarBuilder& builder, const CharNfa& nfa);

}  // namespace millrace::grammar
