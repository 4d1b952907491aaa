// From expressions to one non-deterministic automaton per rule (Thompson's construction over bytes), and from
// there (determinize.h) to deterministic tables. Inside compile_automaton only.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "grammar/automaton.h"

namespace millrace::grammar {

struct Nfa {
  struct Edge {
    enum class Kind : uint8_t { kEmpty, kBytes, kCall } kind = Kind::kEmpty;
    uint8_t first = 0, last = 0;
    RuleId rule = 0;
    uint32_t target = 0;
  };
  std::vector<std::vector<Edge>> states = {};
  uint32_t start = 0, accept = 0;
};

// Lowers every rule that the root reaches. Small rules and those used once are copied into their callers; the
// bodies of long repetitions become rules of their own, called once per turn.
class RuleLowering {
 public:
  RuleLowering(const GrammarBuilder& builder, RuleId root, std::string what);

  struct Lowered {
    std::string name = {};
    Nfa nfa = {};
  };
  // [0] is the root; calls in the automata are indices into this list.
  std::vector<Lowered> lower();
  // The rules for any character beyond ASCII but the line separators, and for these; kNoRule if never called.
  RuleId non_ascii() const { return non_ascii_; }
  RuleId separators() const { return separators_; }

  static constexpr RuleId kNoRule = 0xffffffff;

 private:
  void find_recursion();
  void collect_calls(ExprId expr, std::vector<RuleId>& out) const;
  uint64_t size_of(ExprId expr);
  bool is_inlined(RuleId rule);
  RuleId called(RuleId rule);
  RuleId outlined(ExprId body);
  RuleId characters_rule(RuleId& rule, const char* name);

  uint32_t new_state();
  void add_edge(uint32_t from, Nfa::Edge edge);
  void lower(ExprId expr, uint32_t from, uint32_t to);
  void lower_set(const CodepointSet& set, uint32_t from, uint32_t to, bool may_call);
  void lower_repeat(const Expr& expr, uint32_t from, uint32_t to);
  void lower_graph(const Graph& graph, uint32_t from, uint32_t to);

  const GrammarBuilder& builder_;
  RuleId root_;
  std::string what_;
  std::vector<uint8_t> recursive_;      // [rule]
  std::vector<uint32_t> uses_;          // [rule]
  std::vector<uint64_t> size_of_expr_;  // [expr], 0: not known yet
  std::vector<Lowered> lowered_;
  std::vector<std::pair<bool, uint32_t>> pending_;  // (is an expression, its or the rule's id), as lowered_
  std::map<std::pair<bool, uint32_t>, RuleId> index_of_;
  // States from which a fixed tail of bytes leads to a target: shared by all characters that end alike.
  std::map<std::vector<uint32_t>, uint32_t> tails_;
  RuleId non_ascii_ = kNoRule, separators_ = kNoRule;
  Nfa* nfa_ = nullptr;
  size_t total_states_ = 0;
};

}  // namespace millrace::grammar
