// From a rule's non-deterministic automaton to tables.
#pragma once

#include <string>
#include <vector>

#include "grammar/rule_nfa.h"

namespace millrace::grammar {

// The states of one rule, numbered from 0, which is the start. Deterministic, unless that would grow too
// much.
struct RuleStates {
  struct One {
    std::vector<ByteEdge> bytes = {};
    std::vector<CallEdge> calls = {};
    bool accepting = false;
  };
  std::vector<One> states = {};
};
// Throws Error{kUnsupported}, naming `what`, for nested repetitions of which each state reaches most others.
RuleStates determinize(const Nfa& nfa, const std::string& what);

}  // namespace millrace::grammar
