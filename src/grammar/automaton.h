// The pushdown automaton that is run: one finite automaton per rule, over bytes and calls of other rules.
//
// Every state can be continued to a whole match and no rule calls itself before it has read a byte, so that a
// set of states and stacks is alive exactly when it is not empty.
#pragma once

#include <bitset>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "grammar/expression.h"

namespace millrace::grammar {

using StateId = uint32_t;
using ByteSet = std::bitset<256>;

constexpr StateId kNoState = 0xffffffff;

struct ByteEdge {
  uint8_t first = 0, last = 0;
  StateId target = 0;
};

struct CallEdge {
  RuleId rule = 0;
  StateId target = 0;  // where the caller goes on
};

struct State {
  uint32_t first_byte_edge = 0, first_call_edge = 0;  // its edges end where those of the next state begin
  RuleId rule = 0;
  bool accepting = false;  // the rule may end here
  // Plain characters are what a JSON string holds unescaped and a pattern's dot takes (is_plain, and beyond
  // ASCII all but line separators). plain_next: any one of them leads there; kNoState: not so. plain_only: a
  // plain character leads nowhere else, not by the rule's end either. plain_dead: none is possible.
  bool plain_only = false, plain_dead = false;
  StateId plain_next = kNoState;
};

struct AutomatonRule {
  std::string name = {};
  StateId start = 0;
  uint32_t rank = 0;    // a rule that another may begin with has the higher rank
  ByteSet first = {};   // bytes it may begin with
  ByteSet follow = {};  // bytes that may come after it, wherever it is called
};

struct Automaton {
  std::vector<State> states = {};  // one more than there are: the last one ends the edges
  std::vector<ByteEdge> byte_edges = {};
  std::vector<CallEdge> call_edges = {};
  std::vector<AutomatonRule> rules = {};
  std::vector<RuleId> rule_of_rank = {};
  RuleId root = 0;

  std::span<const ByteEdge> bytes_of(StateId s) const {
    return {byte_edges.data() + states[s].first_byte_edge, byte_edges.data() + states[s + 1].first_byte_edge};
  }
  std::span<const CallEdge> calls_of(StateId s) const {
    return {call_edges.data() + states[s].first_call_edge, call_edges.data() + states[s + 1].first_call_edge};
  }
  bool only_ends(StateId s) const {
    return states[s].accepting && bytes_of(s).empty() && calls_of(s).empty();
  }
  size_t num_states() const { return states.size() - 1; }
  size_t bytes() const;  // of memory
};

constexpr bool is_plain(uint32_t c) { return c >= 0x20 && c != '"' && c != '\\'; }
constexpr uint32_t kFirstLineSeparator = 0x2028, kLastLineSeparator = 0x2029;
constexpr bool is_line_separator(uint32_t c) { return c >= kFirstLineSeparator && c <= kLastLineSeparator; }

// Throws Error{kUnsupported} for what is too large or calls itself before it reads, Error{kBadInput} when no
// text matches. `what` names the input in messages.
Automaton compile_automaton(const GrammarBuilder& builder, RuleId root, const std::string& what);

}  // namespace millrace::grammar
